"""Weights, gradients and moments sharded over processes (FSDP2), with several copies of them where asked for (HSDP).

Gradients are *sums* over processes: each one divides its loss by the loss tokens of the whole batch. torch's own averaging is turned off;
with gloo there is one way to do that which is right for all group sizes (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.models.decoder import Decoder
from slipstream.models.layers import MoE
from slipstream.parallel.comm import all_gather
from slipstream.parallel.expert import SharedExperts
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.pipeline import own_layers, to_leader


def shard(model: Decoder, mesh: Mesh, dtype: torch.dtype) -> None:
    """Shard in place. Masters, gradients and their sums stay float32; layers are gathered, and compute, in `dtype`.

    Embedding, norm and head stay gathered from the forward to the end of the backward pass, since the loss uses the head outside of the
    model. The routing bias is left whole: it is tiny, moves by counts and must not be rounded.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    biases = {m.router_bias for m in model.modules() if isinstance(m, MoE) and m.router_bias is not None}

    def sharded(module: nn.Module, reshard: bool, experts: bool = False) -> None:
        fully_shard(module, mesh=mesh.shards(experts), reshard_after_forward=reshard, mp_policy=precision, ignored_params=biases)

    for layer in own_layers(model):
        for module in layer.modules():
            if isinstance(module, SharedExperts):
                sharded(module, reshard=True, experts=True)
        sharded(layer, reshard=True)
    sharded(model, reshard=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float, mesh: Mesh) -> float:
    """Scale gradients down to the global norm `max_norm`, over all parameters and processes; returns the norm before."""
    if mesh.alone:
        return float(nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True))
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    squares = sum((g.square().sum(dtype=torch.float64) for g in grads), torch.zeros((), dtype=torch.float64))
    norm = float(mesh.add_up(squares / mesh.config.dp_replicate).sqrt())
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm


def whole(tensor: Tensor, mesh: Mesh) -> Tensor:
    """A parameter, gradient or moment put together from all processes, which all have to call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    if not _is_expert(tensor):
        return full
    return all_gather(full, mesh.expert_group)


def gather(tensors: Mapping[str, Tensor], mesh: Mesh, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`tensors` whole, one after the other, sharded ones in `dtype`, of all stages of a pipeline. Only the leading process keeps them:
    elsewhere the result is empty."""

    def wholes() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            full = whole(tensor, mesh)
            yield name, full if full is tensor or dtype is None else full.to(dtype)

    return to_leader(wholes(), mesh)


def part(full: Tensor, like: Tensor, mesh: Mesh) -> Tensor:
    """The inverse of `whole`: what this process keeps of `full`, sharded as `like` is. Nothing is sent."""
    if not isinstance(like, DTensor):
        return full
    if _is_expert(like):
        full = full.chunk(mesh.config.ep)[mesh.expert_rank]
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def _is_expert(tensor: DTensor) -> bool:
    return "expert_fsdp" in (tensor.device_mesh.mesh_dim_names or ())


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
