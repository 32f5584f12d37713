"""Expert parallelism: each process keeps some of the experts of a layer, and tokens travel to the experts that they chose and back.

Changes the expert stack of a layer from outside, whatever it computes: a module whose parameters all have one entry for each expert
first, and `forward(x_TD, ids_TK, gates_TK)`. No token is dropped: the exchange takes as many rows as were chosen.

Shapes: T tokens, K experts per token, D hidden features, E experts, e of them here, P processes, N = T K pairs that leave, M that arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.errors import StateError
from slipstream.models.decoder import Decoder
from slipstream.models.layers import MoE
from slipstream.parallel.comm import all_to_all
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

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        ids_N = ids_TK.flatten()
        order_N = ids_N.argsort(stable=True)
        token_N = order_N // ids_TK.shape[1]
        sent_Pe = torch.bincount(ids_N, minlength=self._num_experts).view(self._size, self._here)
        received_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(received_Pe, sent_Pe, group=self._group)
        sent_P, received_P = sent_Pe.sum(1).tolist(), received_Pe.sum(1).tolist()
        x_MD = all_to_all(x_TD.index_select(0, token_N), sent_P, received_P, self._group)
        ids_M = torch.arange(self._here).repeat(self._size).repeat_interleave(received_Pe.flatten())
        y_MD = self._compute(x_MD, ids_M.unsqueeze(1), x_MD.new_ones(len(x_MD), 1))
        y_ND = all_to_all(y_MD, received_P, sent_P, self._group)
        y_ND = y_ND * gates_TK.flatten().index_select(0, order_N).to(y_ND.dtype).unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, token_N, y_ND)
