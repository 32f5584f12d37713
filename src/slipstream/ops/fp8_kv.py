"""Keys or values of a paged cache in FP8: E4M3 codes with a power-of-two scale for each token, head and 128 features.

A token is written once, from what it is alone: scales of a whole block would change codes that are there already when a larger token
comes, and scales of a layer have to be calibrated on other data. So whatever computed a token, in whichever order and company, its bytes
are the same, and a block that is found, fetched or handed over equals one that is computed again. SnapMLA (Zhang et al., 2026,
arXiv 2602.10718, section 3) chooses scales by the token for the same reason. A scale is one byte (E8M0: an exponent, as in the OCP
"Microscaling Formats (MX) Specification", 2023, section 5.4.1), which loses nothing: the codes are floating point themselves.

Attention reads values in float32 (`read`); the codes are never multiplied. Shapes: N blocks, B tokens in a block, G KV heads, d head
features, T tokens, S sequences, U blocks in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import StateError
from slipstream.ops.fp8 import ACTIVATION, DEPTH, decode, quantise
from slipstream.ops.native import in_large_pages


def scales_of(features: int) -> int:
    """Scales of one token and head; a byte each."""
    return -(-features // DEPTH)


@dataclass(frozen=True, slots=True)
class Fp8Pages:
    """The keys, or the values, of one layer."""

    codes: Tensor
    """[N, B, G, d] float8_e4m3fn"""
    scales: Tensor
    """[N, B, G, ceil(d / 128)] float8_e8m0fnu"""

    @staticmethod
    def zeros(shape: tuple[int, int, int, int]) -> Fp8Pages:
        return Fp8Pages(
            in_large_pages(torch.empty(shape, dtype=torch.uint8)).zero_().view(torch.float8_e4m3fn),
            torch.zeros(*shape[:3], scales_of(shape[3]), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        )

    def write(self, x_TGd: Tensor, slots_T: Tensor) -> None:
        """Store T tokens in place. `slots` int64 [T]: block · block_tokens + offset of each token."""
        if x_TGd.shape != (len(slots_T), *self.codes.shape[2:]):
            raise StateError(f"FP8 KV cache: {tuple(x_TGd.shape)} for {len(slots_T)} slots of {tuple(self.codes.shape[2:])}")
        made = quantise(x_TGd, ACTIVATION, power_of_two=True)
        for pages, new in ((self.codes, made.codes), (self.scales, made.scales.to(torch.float8_e8m0fnu))):
            pages.view(torch.uint8).flatten(0, 1).index_copy_(0, slots_T, new.contiguous().view(torch.uint8))

    def read(self, blocks_U: Tensor) -> Tensor:
        """[U, B, G, d] float32 of these blocks."""
        scales = self.scales.view(torch.uint8)[blocks_U].view(torch.float8_e8m0fnu).float()
        values = decode(self.codes.view(torch.uint8)[blocks_U].view(torch.float8_e4m3fn))
        return values.mul_(scales.repeat_interleave(DEPTH, -1)[..., : values.shape[-1]] if scales.shape[-1] > 1 else scales)


def used_blocks(block_table_SB: Tensor, context_S: Tensor, block_tokens: int) -> tuple[Tensor, Tensor]:
    """(blocks that hold a token of any context [U], the table [S, B] with places in that list in place of block numbers)."""
    column_B = torch.arange(block_table_SB.shape[1], device=context_S.device)
    real_SB = column_B * block_tokens < context_S[:, None]
    blocks_U, place_SB = block_table_SB.where(real_SB, block_table_SB[:, :1]).unique(return_inverse=True)
    return blocks_U.long(), place_SB.int()
