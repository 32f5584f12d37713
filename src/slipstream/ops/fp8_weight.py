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
    """What rounding to FP8 does, summed over everything that was quantised since `reset`; metrics only."""

    KINDS = "weight", "input", "grad"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums_K4 = torch.zeros(len(self.KINDS), 4, dtype=torch.float64)
        """By kind: squares of the errors, squares of the values, values that became 0, values. Can be added up over processes."""

    def add(self, kind: str, exact: Tensor, quantised: Quantised, times: int = 1) -> None:
        """`times`: for how many tensors of this size it stands."""
        exact = exact.detach().float()
        values = quantised.dequantise()
        lost = ((values == 0) & (exact != 0)).sum()
        new = [float((values - exact).square().sum()), float(exact.square().sum()), float(lost), float(exact.numel())]
        self.sums_K4[self.KINDS.index(kind)] += times * torch.tensor(new, dtype=torch.float64)

    def shares(self) -> dict[str, tuple[float, float]]:
        """By kind, of those that occurred: (norm of the error over the norm of the values, share of values that became 0)."""
        by_kind = zip(self.KINDS, self.sums_K4.tolist(), strict=True)
        return {kind: ((error / max(size, 1e-300)) ** 0.5, lost / count) for kind, (error, size, lost, count) in by_kind if count}


class Uncounted(Fp8Errors):
    """Where nobody asks for the errors: finding them costs more than the product."""

    def add(self, kind: str, exact: Tensor, quantised: Quantised, times: int = 1) -> None:
        pass


class Fp8Weight(nn.Parameter):
    """[K, N], or [E, K, N] of experts. Its codes are either kept beside its values (`of`), or all that there is (`without_values`), or made
    from its values at every use, or came from elsewhere (`turn_into`)."""

    columns: tuple[int, ...]
    """Widths of the matrices side by side in it, each quantised by itself."""
    power_of_two: bool
    errors: Fp8Errors
    times: int
    """For how many weights of this size it stands in `errors`."""
    kept: tuple[Quantised, ...] | None

    @staticmethod
    def of(weight: nn.Parameter, columns: Sequence[int], power_of_two: bool, errors: Fp8Errors) -> Fp8Weight:
        """The same memory as a weight of this class. `requantise` it after every change of its values."""
        made: Any = torch.Tensor._make_subclass(Fp8Weight, weight.detach(), weight.requires_grad)
        Fp8Weight.turn_into(made, columns, power_of_two, errors)
        made.requantise()
        return made

    @staticmethod
    def without_values(shape: Sequence[int], columns: Sequence[int], power_of_two: bool) -> Fp8Weight:
        """Room for codes and scales, to be filled: one byte a value. On the meta device as a parameter, and never trained."""
        made: Any = torch.Tensor._make_subclass(Fp8Weight, torch.empty(tuple(shape), dtype=torch.bfloat16, device="meta"), False)
        scales = [torch.zeros(*shape[:-2], -(-shape[-2] // WEIGHT[0]), -(-width // WEIGHT[1])) for width in columns]
        codes = torch.zeros(tuple(shape), dtype=torch.float8_e4m3fn).split(tuple(columns), -1)
        parts = tuple(Quantised(part, scale, WEIGHT) for part, scale in zip(codes, scales, strict=True))
        Fp8Weight.turn_into(made, columns, power_of_two, Uncounted(), codes=parts)
        return made

    @staticmethod
    def turn_into(
        weight: nn.Parameter,
        columns: Sequence[int],
        power_of_two: bool,
        errors: Fp8Errors,
        times: int = 1,
        codes: tuple[Quantised, ...] | None = None,
    ) -> None:
        """Make `weight` itself one, for whoever holds on to it and changes its values behind our back: FSDP gathers into one parameter
        again and again, and frees it in between. Its gradient becomes float32 whatever its dtype. With `codes` its values are never
        read."""
        made: Any = weight
        made.__class__ = Fp8Weight
        made.columns, made.power_of_two, made.errors, made.times, made.kept = tuple(columns), power_of_two, errors, times, codes
        if made.requires_grad:
            made.grad_dtype = torch.float32

    @property
    def parts(self) -> tuple[Quantised, ...]:
        """Its matrices in FP8."""
        return self._quantised() if self.kept is None else self.kept

    def expert(self, index: int) -> Fp8Weight:
        """[1, K, N]: the codes of one expert of a stack without values, in the same memory."""
        made: Any = torch.Tensor._make_subclass(Fp8Weight, self.detach()[index : index + 1], False)
        parts = tuple(Quantised(p.codes[index : index + 1], p.scales[index : index + 1], p.tile) for p in self.parts)
        Fp8Weight.turn_into(made, self.columns, self.power_of_two, self.errors, codes=parts)
        return made

    @property
    def memory(self) -> Sequence[Tensor]:
        """Everything of it that takes memory."""
        values = () if self.is_meta else (self.detach(),)
        return (*values, *(tensor for part in self.kept or () for tensor in (part.codes, part.scales)))

    def requantise(self) -> None:
        self.kept = self._quantised()

    @torch.no_grad()
    def _quantised(self) -> tuple[Quantised, ...]:
        values = self.detach().split(self.columns, -1)
        parts = tuple(quantise(part, WEIGHT, self.power_of_two) for part in values)
        for part, quantised in zip(values, parts, strict=True):
            self.errors.add("weight", part, quantised, self.times)
        return parts

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
        ctx.weight, ctx.ends = weight, ends
        return torch.cat([grouped_matmul(x, _stack(part), ends) for part in weight.parts], -1).to(x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight: Fp8Weight = ctx.weight
        dx_TK = dw = None
        if ctx.needs_input_grad[0]:
            parts = zip(dy_TN.split(weight.columns, -1), weight.parts, strict=True)
            dx_TK = torch.stack([_input_gradient(dy, _stack(part), ctx.ends, weight) for dy, part in parts]).sum(0).to(dy_TN.dtype)
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
