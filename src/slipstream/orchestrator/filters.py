"""Checks on groups and rollouts before they are trained. Pure functions: each returns the reason, or None.

Whether a reason is only counted ('monitor') or drops what it caught ('enforce') is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.config.run import FilterConfig
from slipstream.types import FloatArray, IntArray, Rollout

_REPEATS = 4
"""A pattern counts as repetition from this many copies in the window on: two may be a quotation or two similar tool calls."""


def group_reason(config: FilterConfig, advantages_S: FloatArray | Sequence[float]) -> str | None:
    """Why a group should not be trained, going by the advantages of its gradable rollouts. None for filters on rollouts."""
    if config.type == "zero_advantage" and zero_advantage(np.asarray(advantages_S)):
        return "zero_advantage"
    return None


def rollout_reason(config: FilterConfig, rollout: Rollout) -> str | None:
    """Why a rollout should not be trained, going by what was sampled. None for filters on groups."""
    completions = [turn.completion for turn in rollout.turns]
    if config.type == "repetition" and any(repetition(c.tokens_N, config.window) for c in completions):
        return "repetition"
    if config.type == "gibberish" and completions and gibberish(np.concatenate([c.logprobs_N for c in completions]), config.min_logprob):
        return "gibberish"
    return None


def zero_advantage(advantages_S: NDArray[np.floating]) -> bool:
    """Whether nothing would be learned: every advantage is 0 (all rewards equal), or there is none."""
    return not np.any(np.abs(advantages_S) > 1e-9)


def repetition(tokens_N: IntArray, window: int) -> bool:
    """Whether some `window` consecutive tokens are one n-gram over and over (n up to window / 4)."""
    if len(tokens_N) < window:
        return False
    for period in range(1, max(window // _REPEATS, 1) + 1):
        same_M = tokens_N[period:] == tokens_N[:-period]
        if _longest_run(same_M) >= window - period:
            return True
    return False


def gibberish(logprobs_N: FloatArray, min_logprob: float) -> bool:
    """Whether the sampled tokens were this unlikely on average: what a policy that has lost its way produces."""
    return bool(len(logprobs_N)) and float(logprobs_N.mean()) < min_logprob


def _longest_run(flags_M: NDArray[np.bool_]) -> int:
    """Length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags_M, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
