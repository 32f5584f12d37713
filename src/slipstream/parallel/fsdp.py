"""Weights, gradients and moments sharded over processes (FSDP2), with several copies of them where asked for (HSDP).

Gradients are *sums* over processes: each one divides its loss by the loss tokens of the whole batch. torch's own averaging is turned off;
with gloo there is one way to do that which is right for all group sizes (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slipstream.models.decoder import Decoder
from slipstream.models.layers import MoE
from slipstream.parallel.comm import all_to_all
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.pipeline import own_layers


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
            if isinstance(module, MoE) and mesh.config.ep > 1:
                sharded(module.experts, reshard=True, experts=True)
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


@torch.no_grad()
def change_whole(tensors: Sequence[Tensor], changes: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
    """changes[i](whole tensors[i]), of which this process gets what it keeps of tensors[i].

    Each is put together in one process only, which changes it and sends the parts back: as many at a time as there are processes, so
    that they share the work, and none holds more than one whole matrix. `tensors` are sharded over the same processes, or all whole.
    """
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    if not sharded:
        return [change(t) for t, change in zip(tensors, changes, strict=True)]
    group = sharded[0].device_mesh.get_group(sharded[0].device_mesh.ndim - 1)
    results: dict[int, Tensor] = {}
    by_size = sorted(range(len(sharded)), key=lambda i: (-sharded[i].numel(), i))
    for start in range(0, len(by_size), group.size()):
        indices = by_size[start : start + group.size()]
        results |= _exchange([sharded[i] for i in indices], [changes[i] for i in indices], indices, group)
    return [results[i] for i in range(len(sharded))]


def _exchange(
    tensors: Sequence[DTensor], changes: Sequence[Callable[[Tensor], Tensor]], keys: Sequence[int], group: dist.ProcessGroup
) -> dict[int, Tensor]:
    """The i-th tensor is changed in the i-th process of the group; by key."""
    own = [t.to_local() for t in tensors]
    sent_P = [t.numel() for t in own] + [0] * (group.size() - len(own))
    mine = group.rank()
    shape = tensors[mine].shape if mine < len(tensors) else torch.Size([0])
    each = -(-shape[0] // group.size())
    rows_P = [min((rank + 1) * each, shape[0]) - min(rank * each, shape[0]) for rank in range(group.size())]
    received_P = [rows * shape[1:].numel() for rows in rows_P]
    whole = all_to_all(torch.cat([t.flatten() for t in own]), sent_P, received_P, group).view(shape)
    changed = changes[mine](whole) if mine < len(tensors) else whole
    back = all_to_all(changed.flatten(), received_P, sent_P, group).split(sent_P)
    return {key: part.view_as(t) for key, part, t in zip(keys, back, own, strict=False)}


def local(tensor: Tensor) -> Tensor:
    """What of a sharded tensor is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
