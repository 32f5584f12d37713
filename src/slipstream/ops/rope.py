"""Rotary position embedding in the "rotate half" convention of Hugging Face checkpoints.

It does not make the tables: the caller indexes its cos/sin by position. Shapes: T tokens, H query heads, G key heads, d head
features, r <= d rotated features (r < d: partial rotary, the rest passes through).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import StateError
from slipstream.ops.native import dense_tokens, native_for


def rope(q_THd: Tensor, k_TGd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + r/2) of every head by the token's angles; returns new (q, k).

    `cos` and `sin` repeat themselves in both halves, as in `cat(freqs, freqs)`.
    Source: Su et al., "RoFormer", 2021, section 3.2; the pairing of halves is that of GPT-NeoX.
    """
    (tokens, heads, dim), (_, kv_heads, _), (_, rotary) = q_THd.shape, k_TGd.shape, cos_Tr.shape
    if k_TGd.shape != (tokens, kv_heads, dim) or not cos_Tr.shape == sin_Tr.shape == (tokens, rotary) or rotary > dim or rotary % 2:
        shapes = [tuple(x.shape) for x in (q_THd, k_TGd, cos_Tr, sin_Tr)]
        raise StateError(f"rope: shapes {shapes}; expected q [T, H, d], k [T, G, d], cos and sin [T, r] with r even and at most d")
    kernels = native_for(q_THd, k_TGd, cos_Tr, sin_Tr)
    if kernels is None or not (cos_Tr.is_contiguous() and sin_Tr.is_contiguous()):
        return rope_reference(q_THd, k_TGd, cos_Tr, sin_Tr)
    q_THd, k_TGd = dense_tokens(q_THd), dense_tokens(k_TGd)
    q_out, k_out = torch.empty_like(q_THd), torch.empty_like(k_TGd)
    pointers = [x.data_ptr() for x in (q_THd, k_TGd, cos_Tr, sin_Tr, q_out, k_out)]
    kernels.rope(*pointers, tokens, heads, kv_heads, q_THd.stride(0), k_TGd.stride(0), dim, rotary)
    return q_out, k_out


def rope_reference(q_THd: Tensor, k_TGd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    cos_T1r, sin_T1r = cos_Tr.to(q_THd.dtype).unsqueeze(1), sin_Tr.to(q_THd.dtype).unsqueeze(1)
    return _rotate(q_THd, cos_T1r, sin_T1r), _rotate(k_TGd, cos_T1r, sin_T1r)


def _rotate(x_THd: Tensor, cos_T1r: Tensor, sin_T1r: Tensor) -> Tensor:
    rotary = cos_T1r.shape[-1]
    x_THr, rest = x_THd[..., :rotary], x_THd[..., rotary:]
    first, second = x_THr.chunk(2, dim=-1)
    rotated_THr = x_THr * cos_T1r + torch.cat((-second, first), dim=-1) * sin_T1r
    return rotated_THr if rotary == x_THd.shape[-1] else torch.cat((rotated_THr, rest), dim=-1)
