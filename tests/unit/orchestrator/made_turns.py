"""Rollouts and samples from a few numbers, for tests of the pure functions."""

from __future__ import annotations

import numpy as np

from slipstream.types import Completion, Outcome, Rollout, Routing, Sample, Sampling, Task, Turn

LAYERS, TOP_K = 2, 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def turn(prompt, tokens, versions=None, routing: Routing | None = None, temperature: float = 1.0, logprobs=None) -> Turn:
    """A turn whose i-th sampled token has logprob -(i + 1) unless told otherwise."""
    logprobs_N = -np.arange(1, len(tokens) + 1, dtype=np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    segments = ((0, len(tokens)),) if versions is None else versions
    done = Completion("r/0", ids(*tokens), logprobs_N, segments, "stop", routing)
    return Turn(ids(*prompt), done, Sampling(temperature=temperature))


def rows(start: int, stop: int, fill: int = 0, invalid=()) -> Routing:
    """Routing of tokens start .. stop - 1; the row of token i holds fill + i."""
    position_T = np.arange(start, stop)
    values = np.broadcast_to((fill + position_T)[:, None, None], (stop - start, LAYERS, TOP_K)).astype(np.uint8)
    return Routing(start, values, ~np.isin(position_T, list(invalid)))


def rollout(*turns: Turn, reward: float | None = 1.0, outcome: Outcome = Outcome.completed) -> Rollout:
    return Rollout("r", Task("e/train/0", "e", 0), "g", outcome, tuple(turns), reward=reward)


def sample(length: int, seed: int = 0, routed: bool = False, advantage: float = 1.0, loss: int | None = None) -> Sample:
    """Random tokens, of which the last `loss` (default: all but the first) are trained."""
    rng = np.random.default_rng((seed, length))
    mask_T = np.arange(length) >= length - (length - 1 if loss is None else loss)
    routing = Routing(0, rng.integers(0, 8, (length, LAYERS, TOP_K)).astype(np.uint8), rng.random(length) < 0.8)
    return Sample(
        rollout_id=f"r{seed}",
        group_id="g",
        env="e",
        tokens_T=rng.integers(0, 100, length).astype(np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, -rng.random(length), 0).astype(np.float32),
        versions_T=np.where(mask_T, rng.integers(0, 4, length), -1).astype(np.int32),
        advantage=advantage,
        reward=advantage + 0.5,
        temperature=0.5 + seed,
        routing=(routing,) if routed else (),
    )
