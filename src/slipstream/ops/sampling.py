"""One token per row of logits: softmax with temperature, then the inverse of its cumulative distribution.

It draws no random numbers and truncates nothing. Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from slipstream.ops.native import check, native_for

_P, _I = ctypes.c_void_p, ctypes.c_int64


def draw(logits_SV: Tensor, temperature_S: Tensor, uniform_S: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids int64 [S], their logprobs fp32 [S]). `logits` fp32 may be overwritten; `uniform` float64 lies in [0, 1).

    The token is the first whose cumulative probability exceeds `uniform`, so one of probability 0 is never drawn. Temperature 0 takes
    the largest logit and reports its logprob at temperature 1. NaN logits give a NaN logprob.
    """
    kernels = native_for(logits_SV)
    if kernels is None or not logits_SV.is_contiguous():
        return draw_reference(logits_SV, temperature_S, uniform_S)
    rows, vocab = logits_SV.shape
    tokens_S, logprobs_S = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    kernels.draw.restype, kernels.draw.argtypes = ctypes.c_int, [_P, _P, _P, _I, _I, _P, _P]
    temperature_S, uniform_S = temperature_S.contiguous(), uniform_S.contiguous()
    pointers = [x.data_ptr() for x in (logits_SV, temperature_S, uniform_S)]
    check(kernels.draw(*pointers, rows, vocab, tokens_S.data_ptr(), logprobs_S.data_ptr()), "draw")
    return tokens_S, logprobs_S


def draw_reference(logits_SV: Tensor, temperature_S: Tensor, uniform_S: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    greedy_S = temperature_S == 0
    probs_SV = torch.softmax(logits_SV / torch.where(greedy_S, 1.0, temperature_S).unsqueeze(1), dim=-1)
    tokens_S = torch.where(greedy_S, logits_SV.argmax(dim=-1), invert(probs_SV, uniform_S))
    return tokens_S, probs_SV.gather(1, tokens_S.unsqueeze(1)).squeeze(1).log()


def invert(weights_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds uniform · total, summed in float64."""
    cumulative_SV = torch.cumsum(weights_SV, dim=-1, dtype=torch.float64)
    target_S1 = (uniform_S * cumulative_SV[:, -1]).unsqueeze(1)
    return torch.searchsorted(cumulative_SV, target_S1, right=True).squeeze(1).clamp_(max=weights_SV.shape[1] - 1)
