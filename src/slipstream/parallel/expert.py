"""Expert parallelism: each process keeps some of the experts of a layer, and tokens travel to the experts that they chose and back.

Replaces the `Experts` of a layer from outside. No token is dropped: the exchange takes as many rows as were chosen.

Shapes: T tokens, K experts per token, D hidden features, E experts, e of them here, P processes, N = T K pairs that leave, M that arrive.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.models.decoder import Decoder
from slipstream.models.layers import Experts, MoE
from slipstream.ops import experts
from slipstream.parallel.comm import all_to_all
from slipstream.parallel.mesh import Mesh


def share_experts(model: Decoder, mesh: Mesh) -> None:
    """Replace the experts of every layer, in place; this process keeps its part of them."""
    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        moe.register_module("experts", SharedExperts(moe.experts, mesh))


class SharedExperts(nn.Module):
    """Has the parameters of `Experts` under the same names, with experts rank · e ... (rank + 1) · e - 1 only."""

    def __init__(self, whole: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        assert isinstance(whole, Experts)
        self.group, self.size, rank = mesh.expert_group, mesh.config.ep, mesh.expert_rank
        here = whole.gate_up.shape[0] // self.size
        self.num_experts, self.here = whole.gate_up.shape[0], here

        def part(weight: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(weight.detach()[rank * here : (rank + 1) * here].clone(), weight.requires_grad)

        self.gate_up, self.down = part(whole.gate_up), part(whole.down)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        ids_N = ids_TK.flatten()
        order_N = ids_N.argsort(stable=True)
        token_N = order_N // ids_TK.shape[1]
        sent_Pe = torch.bincount(ids_N, minlength=self.num_experts).view(self.size, self.here)
        received_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        sent_P, received_P = sent_Pe.sum(1).tolist(), received_Pe.sum(1).tolist()
        x_MD = all_to_all(x_TD.index_select(0, token_N), sent_P, received_P, self.group)
        ids_M = torch.arange(self.here).repeat(self.size).repeat_interleave(received_Pe.flatten())
        y_MD = experts(x_MD, ids_M.unsqueeze(1), x_MD.new_ones(len(x_MD), 1), self.gate_up, self.down)
        y_ND = all_to_all(y_MD, received_P, sent_P, self.group)
        y_ND = y_ND * gates_TK.flatten().index_select(0, order_N).to(y_ND.dtype).unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, token_N, y_ND)
