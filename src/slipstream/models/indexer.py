"""The indexer of sparse attention: small queries and keys of its own, by which a token chooses the tokens that it sees.

Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1. Scores and choice are `ops.indexer`'s, behind `Context.select`. The published
inference code also rotates queries and keys by a Hadamard matrix, which changes no product of theirs, before it rounds them to fp8; here
nothing is rounded.

No gradient reaches it: the choice is not differentiable, and the loss that the published models trained it with (its scores against the
attention's) is not implemented. Its parameters are loaded, kept, saved and published as they are.

Shapes: T tokens, D hidden features, C features of the short vector of queries, J index heads, i features of them, r rotated features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.context import Context
from slipstream.models.layers import empty
from slipstream.models.rotary import halves
from slipstream.models.spec import ModelSpec
from slipstream.ops import rope

NORM_EPS = 1e-6
"""Of the keys' norm; not an option of the architecture."""


class Indexer(nn.Module):
    """Of decoder layer `layer`."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        assert spec.indexer is not None and spec.latent is not None
        self.layer, self.sizes, self.rotary_dim = layer, spec.indexer, spec.rotary_dim
        self.queries = empty(spec.latent.q_rank, spec.index_rows)
        self.key_weights = empty(spec.hidden, spec.indexer.head_dim + spec.indexer.heads)
        self.k_norm, self.k_norm_bias = empty(spec.indexer.head_dim), empty(spec.indexer.head_dim)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, q_TC: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, ctx: Context) -> Tensor | None:
        """The choice, as `Context.select` returns it. `q`: the short vectors of queries."""
        heads, dim = self.sizes.heads, self.sizes.head_dim
        q_TJi = torch.mm(q_TC, self.queries).unflatten(1, (heads, dim))
        k_Ti, weights_TJ = torch.mm(x_TD, self.key_weights).split_with_sizes((dim, heads), dim=1)
        k_Ti = F.layer_norm(k_Ti, (dim,), self.k_norm, self.k_norm_bias, NORM_EPS)
        q_TJi, k_T1i = rope(self._paired(q_TJi), self._paired(k_Ti.unsqueeze(1)), cos_Tr, sin_Tr)
        return ctx.select(self.layer, q_TJi, k_T1i.squeeze(1), weights_TJ.float() * (heads * dim) ** -0.5, self.sizes.top_k)

    def _paired(self, x_TJi: Tensor) -> Tensor:
        if not self.sizes.interleaved:
            return x_TJi
        return torch.cat((halves(x_TJi[..., : self.rotary_dim]), x_TJi[..., self.rotary_dim :]), -1)
