"""Root-mean-square normalisation, of hidden states and of single heads (query/key norm).

It knows nothing of models. Shapes: T tokens, H heads, D features; any number of leading dimensions is accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in fp32 and returned in the dtype of `x`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    return rms_norm_reference(x_TD, weight_D, eps)


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in plain torch. The order of rounding (normalise, cast, then weight) is that of the published models."""
    wide_TD = x_TD.float() if x_TD.dtype in (torch.bfloat16, torch.float16) else x_TD
    normed_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype)
