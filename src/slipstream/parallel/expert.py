"""Expert parallelism: each process keeps some of the experts of a layer, and tokens travel to the experts that they chose and back.

Changes the expert stack of a layer from outside, whatever it computes: a module whose parameters all have one entry for each expert
first, and `forward(x_TD, ids_TK, gates_TK)`. No token is dropped: the exchange takes as many rows as were chosen.

With `ep_chunks` the tokens of a pass go in several parts: while one is computed the next ones are on their way there, and the last ones
back; so are their gradients in the backward pass.

Shapes: T tokens, K experts per token, D hidden features, E experts, e of them here, P processes, C chunks; N pairs of a chunk that leave,
M that arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.errors import StateError
from slipstream.models.decoder import Decoder
from slipstream.models.layers import MoE
from slipstream.parallel.comm import AllToAll
from slipstream.parallel.mesh import Mesh

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_TD, ids_TK, gates_TK) -> y_TD"""


def share_experts(model: Decoder, mesh: Mesh) -> None:
    """Share out the experts of every layer, in place: this process keeps experts rank · e ... (rank + 1) · e - 1 under the same names."""
    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        _keep_part(moe.experts, model.spec.num_experts, mesh)
        moe.experts.forward = ExpertExchange(moe.experts.forward, model.spec.num_experts, mesh)


def _keep_part(stack: nn.Module, num_experts: int, mesh: Mesh) -> None:
    here = num_experts // mesh.config.ep
    own = slice(mesh.expert_rank * here, (mesh.expert_rank + 1) * here)
    for name, weight in list(stack.named_parameters()):
        if weight.shape[0] != num_experts:
            raise StateError(f"{name} {tuple(weight.shape)} of {type(stack).__name__} has no entry for each of {num_experts} experts")
        owner, _, last = name.rpartition(".")
        setattr(stack.get_submodule(owner), last, nn.Parameter(weight.detach()[own].clone(), weight.requires_grad))


class ExpertExchange:
    """What an expert stack computes, with the experts of all processes: `compute` does it with those that are here."""

    def __init__(self, compute: Compute, num_experts: int, mesh: Mesh) -> None:
        self._compute, self._num_experts = compute, num_experts
        self._group, self._size, self._here = mesh.expert_group, mesh.config.ep, num_experts // mesh.config.ep
        self._chunks = mesh.config.ep_chunks

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        parts = list(zip(*(whole.tensor_split(self._chunks) for whole in (x_TD, ids_TK, gates_TK)), strict=True))
        order_CN = [ids_TK.flatten().argsort(stable=True) for _, ids_TK, _ in parts]
        sent_PCe = torch.stack([torch.bincount(ids_TK.flatten(), minlength=self._num_experts) for _, ids_TK, _ in parts])
        sent_PCe = sent_PCe.view(self._chunks, self._size, self._here).transpose(0, 1).contiguous()
        received_PCe = torch.empty_like(sent_PCe)
        dist.all_to_all_single(received_PCe, sent_PCe, group=self._group)
        sent_CP, received_CP = sent_PCe.sum(2).T.tolist(), received_PCe.sum(2).T.tolist()
        there = [
            AllToAll(x.index_select(0, order_N // ids_TK.shape[1]), sent_P, received_P, self._group)
            for (x, _, _), order_N, sent_P, received_P in zip(parts, order_CN, sent_CP, received_CP, strict=True)
        ]
        back = []
        for chunk, exchange in enumerate(there):
            x_MD = exchange.wait()
            ids_M = torch.arange(self._here).repeat(self._size).repeat_interleave(received_PCe[:, chunk].flatten())
            y_MD = self._compute(x_MD, ids_M.unsqueeze(1), x_MD.new_ones(len(x_MD), 1))
            back.append(AllToAll(y_MD, received_CP[chunk], sent_CP[chunk], self._group))
        return torch.cat([_combined(e.wait(), order_N, gates) for e, order_N, (_, _, gates) in zip(back, order_CN, parts, strict=True)])


def _combined(y_ND: Tensor, order_N: Tensor, gates_TK: Tensor) -> Tensor:
    """Results, in the order of experts, weighed and added up by token."""
    y_ND = y_ND * gates_TK.flatten().index_select(0, order_N).to(y_ND.dtype).unsqueeze(-1)
    return y_ND.new_zeros(len(gates_TK), y_ND.shape[1]).index_add(0, order_N // gates_TK.shape[1], y_ND)
