"""Weights that are multiplied in block-scaled FP8, forward and backward: a parameter that says how it is multiplied.

Models know nothing of it: they call `torch.mm`, `torch.addmm` and `experts`, and a weight of this class answers. Other products with it
are refused, so that no weight leaves FP8 silently.

Recipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3), for y = x · w with dy the gradient of y:

    y  = q(x) · q(w)        x 1 x 128 along features, w 128 x 128
    dx = q(dy) · q(w)ᵀ      dy 1 x 128 along features; the codes of w are those of the forward pass
    dw = q(q(x))ᵀ · q(dy)   both 128 x 1 along tokens; the forward pass keeps x in FP8, so it is quantised again from there

Everything that is added up is float32; y and dx are rounded to the dtype of x, dw is handed over in float32.
Shapes: T tokens, K features in, N features out, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slipstream.errors import StateError
from slipstream.ops.fp8 import ACTIVATION, WEIGHT, Quantised, contract_tokens, grouped_matmul, quantise


class Fp8Errors:
    """What rounding to FP8 does, summed over everything that was quantised since `take`; metrics only."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, kind: str, exact: Tensor, quantised: Quantised) -> None:
        exact = exact.detach().float()
        values = quantised.dequantise()
        lost = ((values == 0) & (exact != 0)).sum()
        new = [float((values - exact).square().sum()), float(exact.square().sum()), float(lost), float(exact.numel())]
        self._sums[kind] = [a + b for a, b in zip(self._sums.get(kind, [0.0] * 4), new, strict=True)]

    def take(self) -> dict[str, tuple[float, float]]:
        """By kind: (norm of the error over the norm of the values, share of values that became 0). Starts anew."""
        sums, self._sums = self._sums, {}
        return {kind: ((error / max(size, 1e-300)) ** 0.5, lost / max(1.0, count)) for kind, (error, size, lost, count) in sums.items()}


class Fp8Weight(nn.Parameter):
    """[K, N], or [E, K, N] of experts. `requantise` after every change of its values."""

    columns: tuple[int, ...]
    """Widths of the matrices side by side in it, each quantised by itself."""
    power_of_two: bool
    errors: Fp8Errors
    parts: tuple[Quantised, ...]

    @staticmethod
    def of(weight: nn.Parameter, columns: Sequence[int], power_of_two: bool, errors: Fp8Errors) -> Fp8Weight:
        """The same memory as a weight of this class; its gradient is float32 whatever its dtype."""
        made: Any = torch.Tensor._make_subclass(Fp8Weight, weight.detach(), weight.requires_grad)
        made.columns, made.power_of_two, made.errors = tuple(columns), power_of_two, errors
        if made.requires_grad:
            made.grad_dtype = torch.float32
        made.requantise()
        return made

    @torch.no_grad()
    def requantise(self) -> None:
        values = self.detach()
        self.parts = tuple(quantise(part, WEIGHT, self.power_of_two) for part in values.split(self.columns, -1))
        for part, quantised in zip(values.split(self.columns, -1), self.parts, strict=True):
            self.errors.add("weight", part, quantised)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _PRODUCTS:
            return _PRODUCTS[name](*args, **kwargs)
        if name in _REFUSED:
            raise StateError(f"{name} with a weight that is multiplied in FP8: use torch.mm, torch.addmm or ops.experts")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _mm(x_TK: Tensor, weight: Fp8Weight) -> Tensor:
    return _Product.apply(x_TK, weight, (len(x_TK),))  # pyright: ignore[reportReturnType]


def _addmm(bias_N: Tensor, x_TK: Tensor, weight: Fp8Weight) -> Tensor:
    return _mm(x_TK, weight) + bias_N


def _grouped_mm(x_TK: Tensor, weight: Fp8Weight, offs: Tensor, bias: None = None, out_dtype: None = None) -> Tensor:
    if bias is not None or out_dtype is not None:
        raise StateError("grouped_mm with an FP8 weight knows no bias and no out_dtype")
    return _Product.apply(x_TK, weight, tuple(offs.tolist()))  # pyright: ignore[reportReturnType]


_PRODUCTS: Mapping[str, Callable[..., Tensor]] = {"mm": _mm, "addmm": _addmm, "_grouped_mm": _grouped_mm}
_REFUSED = frozenset(
    {
        *("data_ptr", "matmul", "__matmul__", "__rmatmul__", "linear", "bmm", "baddbmm", "addbmm", "mv", "addmv", "einsum", "tensordot"),
        *("inner", "bilinear", "_scaled_mm"),
    }
)
"""Torch's other ways to multiply a matrix; `data_ptr` is how a native kernel reads a weight."""


class _Product(torch.autograd.Function):
    """x · w, row groups of x with the experts of w (a plain matrix is one expert)."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Fp8Weight, ends: tuple[int, ...]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = quantise(x_TK, ACTIVATION, weight.power_of_two)
        weight.errors.add("input", x_TK, x)
        ctx.save_for_backward(x.codes, x.scales)
        ctx.weight, ctx.parts, ctx.ends = weight, [_stack(part) for part in weight.parts], ends
        return torch.cat([grouped_matmul(x, part, ends) for part in ctx.parts], -1).to(x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight: Fp8Weight = ctx.weight
        dx_TK = dw = None
        if ctx.needs_input_grad[0]:
            parts = zip(dy_TN.split(weight.columns, -1), ctx.parts, strict=True)
            dx_TK = torch.stack([_input_gradient(dy, part, ctx.ends, weight) for dy, part in parts]).sum(0).to(dy_TN.dtype)
        if ctx.needs_input_grad[1]:
            codes, scales = ctx.saved_tensors
            x_TK = Quantised(codes, scales, ACTIVATION).dequantise()
            dw = contract_tokens(x_TK, dy_TN, ctx.ends, weight.power_of_two).view(weight.shape)
        return dx_TK, dw, None


def _input_gradient(dy_TN: Tensor, part: Quantised, ends: tuple[int, ...], weight: Fp8Weight) -> Tensor:
    dy = quantise(dy_TN, ACTIVATION, weight.power_of_two)
    weight.errors.add("grad", dy_TN, dy)
    return grouped_matmul(dy, part.mT, ends)


def _stack(part: Quantised) -> Quantised:
    return part if part.codes.dim() == 3 else Quantised(part.codes[None], part.scales[None], part.tile)
