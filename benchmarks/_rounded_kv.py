"""A full pass over keys and values as an FP8 cache has them: what an engine with such a cache computes, without the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.context import FullContext
from slipstream.ops import Sight
from slipstream.ops.fp8_kv import Fp8Pages


class RoundedKv(FullContext):
    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        return super().attend(layer, q_THd, _rounded(k_TGd), _rounded(v_TGd), sight)


def _rounded(x_TGd: Tensor) -> Tensor:
    pages = Fp8Pages.zeros((1, *x_TGd.shape))
    pages.write(x_TGd, torch.arange(len(x_TGd)))
    return pages.read(torch.tensor([0]))[0].to(x_TGd.dtype)
