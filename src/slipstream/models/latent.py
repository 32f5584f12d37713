"""Multi-head latent attention: keys and values of all heads are made from one short vector a token, and share one rotated part.

Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; "DeepSeek-V3 Technical Report", 2024, section 2.1.1.

What attention sees is ordinary attention with as many key/value heads as query heads. The context is given what they are made of and
how (`Context.attend_latent`): several processes exchange the short vectors; the cache of an engine holds keys and values expanded.

Shapes: T tokens, D hidden features, H heads, d head features at the seam, n features of a head without position, r rotated ones,
v value features of a head, C features of the short vector.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.context import Context
from slipstream.models.indexer import Indexer
from slipstream.models.layers import empty, linear
from slipstream.models.rotary import halves
from slipstream.models.spec import ModelSpec
from slipstream.ops import Sight, rms_norm, rope

NORM_EPS = 1e-6
"""Of the norms within attention; not an option of the architecture."""


class LatentAttention(nn.Module):
    """With or without a short vector for queries; sparse where the model has indexers.

    Weights that read the hidden state are one matrix: queries first, then [C, r]."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        assert spec.latent is not None
        self.layer, self.heads, self.latent, self.head_dim = layer, spec.num_heads, spec.latent, spec.head_dim
        self.query_scale = spec.latent.score_gain * (spec.head_dim / (spec.latent.nope_dim + spec.latent.rope_dim)) ** 0.5
        """The seam scales scores by d^-1/2."""
        sizes, self.q_size = spec.latent, spec.latent.q_rank or spec.q_latent_rows
        if sizes.q_rank:
            self.qkv_down = empty(spec.hidden, self.q_size + spec.kv_down_rows)
            self.qkv_down_bias = empty(self.q_size + spec.kv_down_rows) if spec.qkv_bias else None
            self.q_norm, self.q_up = empty(sizes.q_rank), empty(sizes.q_rank, spec.q_latent_rows)
        else:
            self.q_kv_down = empty(spec.hidden, self.q_size + spec.kv_down_rows)
            self.kv_down_bias = empty(spec.kv_down_rows) if spec.qkv_bias else None
        self.indexer = Indexer(spec, layer) if layer in spec.index_layers else None
        self.source = None if spec.indexer is None else spec.indexer.sources[layer]
        self.kv_norm, self.kv_up = empty(sizes.kv_rank), empty(sizes.kv_rank, spec.kv_up_rows)
        self.out = empty(spec.num_heads * sizes.v_dim, spec.hidden)
        self.out_bias = empty(spec.hidden) if spec.out_bias else None

    def forward(self, x_TD: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, ctx: Context) -> Tensor:
        q_THd, kv_down_T, q_TC = self._down(x_TD)
        selected_TK = None
        if self.indexer is not None:
            selected_TK = self.indexer(x_TD, q_TC, cos_Tr, sin_Tr, ctx)
        elif self.source is not None:
            selected_TK = ctx.selected(self.source)
        sizes = self.latent
        q_THn, q_THr = q_THd.split_with_sizes((sizes.nope_dim, sizes.rope_dim), dim=-1)
        kv_TC, k_Tr = kv_down_T.split_with_sizes((sizes.kv_rank, sizes.rope_dim), dim=-1)
        q_THr, k_T1r = rope(self._pairs(q_THr), self._pairs(k_Tr.unsqueeze(1)), cos_Tr, sin_Tr)
        q_THd = torch.cat((q_THn, q_THr), -1)
        if self.query_scale != 1:
            q_THd = q_THd * self.query_scale
        latent_T = torch.cat((rms_norm(kv_TC, self.kv_norm, NORM_EPS), k_T1r.squeeze(1)), -1)
        sight = None if selected_TK is None else Sight(selected_TK=selected_TK)
        out_THd = ctx.attend_latent(self.layer, self._wide(q_THd), latent_T, self.kv_up, self._expand, sight)
        return linear(out_THd[..., : sizes.v_dim].flatten(1), self.out, self.out_bias)

    def _expand(self, latent_T: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, H, d] of [T, C + r]; the rotated part is the same for all heads."""
        sizes = self.latent
        kv_TC, k_Tr = latent_T.split_with_sizes((sizes.kv_rank, sizes.rope_dim), dim=-1)
        kv_THx = torch.mm(kv_TC, up).unflatten(1, (self.heads, -1))
        k_THn, v_THv = kv_THx.split_with_sizes((sizes.nope_dim, sizes.v_dim), dim=-1)
        k_THd = torch.cat((k_THn, k_Tr.unsqueeze(1).expand(-1, self.heads, -1)), -1)
        return self._wide(k_THd), self._wide(v_THv)

    def _down(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries [T, H, n + r], what keys and values are made of [T, C + r], and what queries are made of where that is something else."""
        q_TC = None
        if self.latent.q_rank:
            q_T, kv_T = linear(x_TD, self.qkv_down, self.qkv_down_bias).tensor_split((self.q_size,), dim=1)
            q_TC = rms_norm(q_T, self.q_norm, NORM_EPS)
            q_T = torch.mm(q_TC, self.q_up)
        else:
            q_T, kv_T = torch.mm(x_TD, self.q_kv_down).tensor_split((self.q_size,), dim=1)
            kv_T = kv_T if self.kv_down_bias is None else kv_T + self.kv_down_bias
        return q_T.unflatten(1, (self.heads, -1)), kv_T, q_TC

    def _pairs(self, x_THr: Tensor) -> Tensor:
        return halves(x_THr) if self.latent.interleaved else x_THr

    def _wide(self, x_THd: Tensor) -> Tensor:
        """Zeros up to the d features of the seam, where keys and values are equally long."""
        missing = self.head_dim - x_THd.shape[-1]
        return F.pad(x_THd, (0, missing)) if missing else x_THd
