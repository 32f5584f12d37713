"""Root-mean-square normalisation, of hidden states and of single heads (query/key norm).

It knows nothing of models. Shapes: T tokens, H heads, D features; any number of leading dimensions is accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import StateError
from slipstream.ops.native import LANES, native_for


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in fp32 and returned in the dtype of `x`.

    Native for [T, D] and [T, H, D] with D a multiple of 8; tokens may be strided (a slice of a fused qkv).
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    dim = x_TD.shape[-1]
    if weight_D.shape != (dim,):
        raise StateError(f"rms_norm: weight has shape {tuple(weight_D.shape)}, expected ({dim},)")
    kernels = native_for(x_TD, weight_D)
    if kernels is None or dim % LANES or x_TD.dim() not in (2, 3) or not weight_D.is_contiguous():
        return rms_norm_reference(x_TD, weight_D, eps)
    rows, heads, stride = x_TD.shape[0], 1 if x_TD.dim() == 2 else x_TD.shape[1], x_TD.stride()
    if stride[-1] != 1 or (heads > 1 and stride[1] != dim):
        return rms_norm(x_TD.contiguous(), weight_D, eps)
    out_TD = torch.empty_like(x_TD)
    kernels.rms_norm(x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr(), rows, heads, stride[0], dim, eps)
    return out_TD


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in plain torch. The order of rounding (normalise, cast, then weight) is that of the published models."""
    wide_TD = x_TD.float() if x_TD.dtype in (torch.bfloat16, torch.float16) else x_TD
    normed_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype)
