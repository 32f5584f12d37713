"""Block-scaled FP8 (E4M3) products, emulated exactly in plain torch: what a kernel must agree with. No gradients (see `fp8_weight`).

A tensor is cut into tiles, each with a float32 scale: s = max|x| / 448, q = round(x / s). A product multiplies codes and adds them up in
float32 within 128 values of the contracted dimension, applies both scales, and adds these sums in float32 (DeepSeek-AI, "DeepSeek-V3
Technical Report", 2024, section 3.3.2).

Dimensions need not be multiples of 128: the last tile of a dimension is smaller. Shapes: M rows, K contracted, N columns, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import StateError

DEPTH = 128
"""Values of the contracted dimension that share a scale."""
LARGEST = 448.0
"""The largest E4M3 number; what the largest value of a tile becomes."""
SMALLEST_SCALE = 2.0**-126
ACTIVATION, TOKENS, WEIGHT = (1, DEPTH), (DEPTH, 1), (DEPTH, DEPTH)
"""Tiles (rows, columns): of what is contracted over its columns, of what is contracted over its rows, of a weight."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix, or a stack of them, as E4M3 codes and their scales."""

    codes: Tensor
    """[..., M, N] float8_e4m3fn"""
    scales: Tensor
    """[..., ceil(M / tile rows), ceil(N / tile columns)] float32"""
    tile: tuple[int, int]

    @property
    def mT(self) -> Quantised:
        """Transposed, without quantising again."""
        return Quantised(self.codes.mT, self.scales.mT, (self.tile[1], self.tile[0]))

    def __getitem__(self, expert: int) -> Quantised:
        """One matrix of a stack."""
        return Quantised(self.codes[expert], self.scales[expert], self.tile)

    def rows(self, start: int, end: int) -> Quantised:
        """Of a matrix whose tiles are one row high."""
        if self.tile[0] != 1:
            raise StateError(f"rows of tiles {self.tile} cannot be cut out: a scale covers several")
        return Quantised(self.codes[start:end], self.scales[start:end], self.tile)

    def dequantise(self) -> Tensor:
        """float32, code times scale."""
        return decode(self.codes).mul_(self._spread(self._spread(self.scales, -2), -1))

    def row_scales(self) -> Tensor:
        """[M, tiles of the columns]"""
        return self._spread(self.scales, -2)

    def column_scales(self) -> Tensor:
        """[tiles of the rows, N]"""
        return self._spread(self.scales, -1)

    def _spread(self, scales: Tensor, dim: int) -> Tensor:
        """Each scale once for every row (dim -2) or column (dim -1) of its tile."""
        size = self.codes.shape[dim]
        return scales if self.tile[dim] == 1 else scales.repeat_interleave(self.tile[dim], dim).narrow(dim, 0, size)


def quantise(x: Tensor, tile: tuple[int, int], power_of_two: bool = False) -> Quantised:
    """`x` [..., M, N] with one scale for each tile. `power_of_two`: scales are rounded up to powers of two, so that applying them is exact.

    What is not finite stays so: a NaN or infinity makes its codes NaN. Raises StateError: `x` is not on the CPU.
    """
    if not x.is_cpu:
        raise StateError(f"block-scaled FP8 is emulated on the CPU; there is no kernel for tensors on {x.device}")
    x = x.float()
    rows, columns = x.shape[-2:]
    high, wide = min(tile[0], max(1, rows)), min(tile[1], max(1, columns))
    counts = -(-rows // high), -(-columns // wide)
    padded = torch.nn.functional.pad(x, (0, counts[1] * wide - columns, 0, counts[0] * high - rows))
    tiled = padded.reshape(*x.shape[:-2], counts[0], high, counts[1], wide)
    scales = _scales(tiled.abs().amax((-3, -1)) if tiled.numel() else tiled.new_zeros(*x.shape[:-2], *counts), power_of_two)
    scaled = tiled / scales[..., :, None, :, None]  # at most 448 but for rounding, which E4M3 takes back
    codes = scaled.to(torch.float8_e4m3fn).reshape(padded.shape)[..., :rows, :columns]
    return Quantised(codes, scales, tile)


@functools.cache
def _values() -> Tensor:
    """[256] float32: what each code stands for."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def decode(codes: Tensor) -> Tensor:
    """E4M3 as float32. Looked up on the CPU, where torch's own cast takes five times as long."""
    if not codes.is_cpu:
        return codes.float()
    return _values().index_select(0, codes.contiguous().view(torch.uint8).flatten().int()).view(codes.shape)


def _scales(amax: Tensor, power_of_two: bool) -> Tensor:
    scales = (amax / LARGEST).clamp_(min=SMALLEST_SCALE)
    if not power_of_two:
        return scales
    mantissa, exponent = scales.frexp()  # scale = mantissa * 2^exponent, 0.5 <= mantissa < 1
    rounded_up = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return torch.where(scales.isfinite(), rounded_up, scales)


def matmul(a: Quantised, b: Quantised) -> Tensor:
    """a [M, K] · b [K, N] in float32. Raises StateError: shapes or tiles do not go together along K."""
    (rows, depth), columns = a.codes.shape, b.codes.shape[1]
    if b.codes.shape[0] != depth or a.tile[1] != DEPTH or b.tile[0] != DEPTH:
        raise StateError(
            f"FP8 product of {tuple(a.codes.shape)} with tiles {a.tile} and {tuple(b.codes.shape)} with tiles {b.tile}: "
            f"expected [M, K] and [K, N], both with tiles of {DEPTH} along K"
        )
    out = torch.zeros(rows, columns)
    if not rows:
        return out
    a_codes, b_codes, a_scales, b_scales = decode(a.codes), decode(b.codes), a.row_scales(), b.column_scales()
    for tile, start in enumerate(range(0, depth, DEPTH)):
        partial = a_codes[:, start : start + DEPTH] @ b_codes[start : start + DEPTH]
        out += partial.mul_(a_scales[:, tile, None]).mul_(b_scales[tile])
    return out


def grouped_matmul(a: Quantised, b: Quantised, ends: Sequence[int]) -> Tensor:
    """[M, N] float32: rows of `a` [M, K] up to ends[0] times b[0], those up to ends[1] times b[1], ... with `b` [E, K, N]."""
    return torch.cat([matmul(a.rows(start, end), b[expert]) for expert, (start, end) in enumerate(_groups(ends))])


def contract_tokens(x_TK: Tensor, y_TN: Tensor, ends: Sequence[int], power_of_two: bool = False) -> Tensor:
    """[E, K, N] float32: xᵀ · y over the tokens of each group, both quantised along tokens. Tiles start anew with every group."""
    tiles = [(quantise(x_TK[s:e], TOKENS, power_of_two), quantise(y_TN[s:e], TOKENS, power_of_two)) for s, e in _groups(ends)]
    return torch.stack([matmul(x.mT, y) for x, y in tiles])


def _groups(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))
