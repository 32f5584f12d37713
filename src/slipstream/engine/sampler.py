"""Next tokens and their logprobs from logits, for all rows at once.

One uniform number per token, from a hash of (seed, position), inverts the cumulative distribution: what a row draws depends on nothing
but its logits, its seed and its position, so a request samples the same tokens alone and in any batch.

The logprob is that of the distribution that was sampled from: after temperature and truncation. Greedy rows (temperature 0) report the
untempered log-softmax. Order of truncation as in transformers: temperature, top-k, top-p (of what top-k left), min-p.

Shape suffixes: S rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slipstream.errors import EngineError
from slipstream.ops.sampling import draw, invert

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S16 = (np.uint64(n) for n in (27, 30, 31, 16))


@dataclass(frozen=True, slots=True)
class SampleParams:
    """One row each: `types.Sampling` as columns, with the seed mixed and the position of the token to be drawn."""

    temperature_S: np.ndarray
    top_p_S: np.ndarray
    top_k_S: np.ndarray
    min_p_S: np.ndarray
    seed_S: np.ndarray
    position_S: np.ndarray


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of uint64 with full avalanche."""
    z = (values ^ (values >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


def mix_seed(seed: int) -> np.uint64:
    """Start of a request's random sequence; neighbouring seeds end up far apart."""
    return mix(np.array([(seed + 1) & 0xFFFFFFFFFFFFFFFF], np.uint64) * _GOLDEN)[0]


def uniforms(seed_S: np.ndarray, position_S: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per row, with 48 random bits: u * total stays below total in float64."""
    bits = mix(seed_S + position_S.astype(np.uint64) * _GOLDEN)
    return (bits >> _S16).astype(np.float64) * 2.0**-48


def sample(logits_SV: torch.Tensor, params: SampleParams) -> tuple[np.ndarray, np.ndarray]:
    """Draw a token per row: (token ids int32, logprobs float32). `logits_SV` is float32 and may be overwritten.

    Raises EngineError when a row's logits are not finite.
    """
    uniform_S = uniforms(params.seed_S, params.position_S)
    cut_S = ((params.top_p_S < 1) | (params.top_k_S > 0) | (params.min_p_S > 0)) & (params.temperature_S > 0)
    rows = np.flatnonzero(cut_S)
    cut_logits_SV = logits_SV[torch.from_numpy(rows)] if len(rows) else None
    drawn_S, logprobs_S = draw(logits_SV, torch.from_numpy(params.temperature_S), torch.from_numpy(uniform_S))
    tokens, logprobs = drawn_S.numpy().astype(np.int32), logprobs_S.numpy()
    if cut_logits_SV is not None:
        tokens[rows], logprobs[rows] = _sample_truncated(cut_logits_SV, torch.from_numpy(uniform_S[rows]), params, rows)
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"{(~np.isfinite(logprobs)).sum()} of {len(logprobs)} rows have logits that are not finite: the weights are broken"
        )
    return tokens, logprobs


def _sample_truncated(
    logits_SV: torch.Tensor, uniform_S: torch.Tensor, params: SampleParams, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows with top-k, top-p or min-p: sort, cut, draw among what is left."""
    vocab = logits_SV.shape[1]
    probs_SV = torch.softmax(logits_SV / torch.from_numpy(params.temperature_S[rows]).unsqueeze(1), dim=-1)
    top_k_S = np.where(params.top_k_S[rows] > 0, np.minimum(params.top_k_S[rows], vocab), vocab)
    sorted_SV, order_SV = torch.topk(probs_SV, int(top_k_S.max()), dim=-1)
    top_k_S1, top_p_S1, min_p_S1 = (
        torch.from_numpy(np.ascontiguousarray(column)).unsqueeze(1) for column in (top_k_S, params.top_p_S[rows], params.min_p_S[rows])
    )
    sorted_SV = sorted_SV * (torch.arange(sorted_SV.shape[1]) < top_k_S1)
    cumulative_SV = torch.cumsum(sorted_SV, dim=-1, dtype=torch.float64)
    before_SV = cumulative_SV - sorted_SV
    keep_SV = (before_SV < top_p_S1 * cumulative_SV[:, -1:]) & (sorted_SV >= min_p_S1 * sorted_SV[:, :1])
    keep_SV[:, 0] = True  # a top_p that is 0 in float32 would leave nothing
    kept_SV = sorted_SV * keep_SV
    index_S1 = invert(kept_SV, uniform_S).unsqueeze(1)
    logprobs_S1 = (kept_SV.gather(1, index_S1) / kept_SV.sum(-1, keepdim=True, dtype=torch.float64)).log()
    return order_SV.gather(1, index_S1).squeeze(1).numpy(), logprobs_S1.squeeze(1).numpy()
