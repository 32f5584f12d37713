"""A few fixed prompts whose logprobs say whether an engine computes with the weights that were published.

An update can go wrong without an error: vLLM 0.32 on a CPU packs expert weights only at the first load, so that after any other every
logit is finite, plausible and wrong. What the files hold is known by their fingerprint; what the engine computes is known by this alone.
Pure: who computes the reference, and who asks the engine, is not known here. Shapes: P prompts, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_ORDINARY_ID = 3
"""Vocabularies begin with control tokens more often than not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far the engine is from the reference."""

    gap: float
    """Mean |difference| of the logprobs, in nats; infinite when one is missing or not finite."""
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.gap <= self.tolerance

    def __str__(self) -> str:
        return f"mean logprob difference {self.gap:.4g} nats, tolerance {self.tolerance:g}"


def canary_prompts(count: int, tokens: int, vocab_size: int) -> list[np.ndarray]:
    """Random tokens, always the same: together they visit most experts."""
    rng = np.random.default_rng(20260)
    return [rng.integers(min(FIRST_ORDINARY_ID, vocab_size - 1), vocab_size, tokens).astype(np.int32) for _ in range(count)]


def compare(engine_PT: Sequence[np.ndarray], reference_PT: Sequence[np.ndarray], tolerance: float) -> Verdict:
    """Logprobs of each prompt's tokens but the first, given those before."""
    gaps = [np.abs(a - b) for a, b in zip(engine_PT, reference_PT, strict=True)]
    gap = float(np.concatenate(gaps).mean()) if gaps else 0.0
    return Verdict(gap if np.isfinite(gap) else float("inf"), tolerance)
