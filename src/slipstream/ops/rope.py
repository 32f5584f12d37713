"""Rotary position embedding in the "rotate half" convention of Hugging Face checkpoints.

It does not make the tables: the caller indexes its cos/sin by position. Shapes: T tokens, H query heads, G key heads, d head
features, r <= d rotated features (r < d: partial rotary, the rest passes through).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.errors import StateError
from slipstream.ops.native import dense_tokens, loaded, native_for


def rope(q_THd: Tensor, k_TGd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + r/2) of every head by the token's angles; returns new (q, k).

    `cos` and `sin` repeat themselves in both halves, as in `cat(freqs, freqs)`. Native, also with gradients, on the CPU; bf16 is widened
    there, and rounded once at the end.
    Source: Su et al., "RoFormer", 2021, section 3.2; the pairing of halves is that of GPT-NeoX.
    """
    (tokens, _, dim), (_, kv_heads, _), (_, rotary) = q_THd.shape, k_TGd.shape, cos_Tr.shape
    if k_TGd.shape != (tokens, kv_heads, dim) or not cos_Tr.shape == sin_Tr.shape == (tokens, rotary) or rotary > dim or rotary % 2:
        shapes = [tuple(x.shape) for x in (q_THd, k_TGd, cos_Tr, sin_Tr)]
        raise StateError(f"rope: shapes {shapes}; expected q [T, H, d], k [T, G, d], cos and sin [T, r] with r even and at most d")
    if q_THd.dtype is torch.bfloat16 and q_THd.is_cpu:
        q_wide, k_wide = rope(q_THd.float(), k_TGd.float(), cos_Tr.float(), sin_Tr.float())
        return q_wide.bfloat16(), k_wide.bfloat16()
    kernels = native_for(q_THd, k_TGd, cos_Tr, sin_Tr, training=True)
    grad = torch.is_grad_enabled()
    if kernels is None or (grad and (cos_Tr.requires_grad or sin_Tr.requires_grad)):
        return rope_reference(q_THd, k_TGd, cos_Tr, sin_Tr)
    inputs = dense_tokens(q_THd), dense_tokens(k_TGd), cos_Tr.contiguous(), sin_Tr.contiguous()
    if grad and (q_THd.requires_grad or k_TGd.requires_grad):
        return _Rope.apply(*inputs)  # pyright: ignore[reportReturnType]
    return _forward(kernels, *inputs)


def _forward(kernels: ctypes.CDLL, q_THd: Tensor, k_TGd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> tuple[Tensor, Tensor]:
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THd, k_TGd))
    pointers = [x.data_ptr() for x in (q_THd, k_TGd, cos_Tr, sin_Tr, q_out, k_out)]
    tokens, heads, dim = q_THd.shape
    kernels.rope(*pointers, tokens, heads, k_TGd.shape[1], q_THd.stride(0), k_TGd.stride(0), dim, cos_Tr.shape[1])
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TGd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_Tr, sin_Tr)
        return _forward(loaded(), q_THd, k_TGd, cos_Tr, sin_Tr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos_Tr, sin_Tr = ctx.saved_tensors
        dq_THd, dk_TGd = (x.contiguous() for x in grads)
        q_out, k_out = torch.empty_like(dq_THd), torch.empty_like(dk_TGd)
        pointers = [x.data_ptr() for x in (dq_THd, dk_TGd, cos_Tr, sin_Tr, q_out, k_out)]
        tokens, heads, dim = dq_THd.shape
        loaded().rope_backward(*pointers, tokens, heads, dk_TGd.shape[1], dim, cos_Tr.shape[1])
        return q_out, k_out, None, None


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
