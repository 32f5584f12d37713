"""Root-mean-square normalisation, of hidden states and of single heads (query/key norm).

It knows nothing of models. Shapes: T tokens, H heads, D features; any number of leading dimensions is accepted.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.errors import StateError
from slipstream.ops.native import LANES, check, dense_tokens, loaded, native_for


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in fp32 and returned in the dtype of `x`.

    Native, also with gradients, on the CPU for [T, D] and [T, H, D] with D a multiple of 8; tokens may be strided (a slice of a fused
    qkv). bf16 is widened there, and rounded once at the end.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    dim = x_TD.shape[-1]
    if weight_D.shape != (dim,):
        raise StateError(f"rms_norm: weight has shape {tuple(weight_D.shape)}, expected ({dim},)")
    if x_TD.dtype is torch.bfloat16 and x_TD.is_cpu:
        return rms_norm(x_TD.float(), weight_D.float(), eps).bfloat16()
    kernels = None if dim % LANES else native_for(x_TD, weight_D, training=True)
    if kernels is None or x_TD.dim() not in (2, 3):
        return rms_norm_reference(x_TD, weight_D, eps)
    x_TD, weight_D = dense_tokens(x_TD), weight_D.contiguous()
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_D.requires_grad):
        return _RmsNorm.apply(x_TD, weight_D, eps)  # pyright: ignore[reportReturnType]
    return _forward(kernels, x_TD, weight_D, eps)


def _forward(kernels: ctypes.CDLL, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    kernels.rms_norm(x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr(), *_sizes(x_TD), eps)
    return out_TD


def _sizes(x_TD: Tensor) -> tuple[int, int, int, int]:
    """Tokens, vectors per token, stride between tokens, features."""
    shape = x_TD.shape
    return shape[0], 1 if len(shape) == 2 else shape[1], x_TD.stride(0), shape[-1]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        return _forward(loaded(), x_TD, weight_D, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TD, weight_D = ctx.saved_tensors
        dy_TD = grads[0].contiguous()
        dx_TD, d_weight_D = torch.empty_like(x_TD, memory_format=torch.contiguous_format), torch.empty_like(weight_D)
        pointers = [x.data_ptr() for x in (x_TD, weight_D, dy_TD, dx_TD, d_weight_D)]
        check(loaded().rms_norm_backward(*pointers, *_sizes(x_TD), ctx.eps), "rms_norm backward")
        return dx_TD, d_weight_D, None


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in plain torch. The order of rounding (normalise, cast, then weight) is that of the published models."""
    wide_TD = x_TD.float() if x_TD.dtype in (torch.bfloat16, torch.float16) else x_TD
    normed_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype)
