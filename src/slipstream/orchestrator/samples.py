"""Rollouts to trainable samples: turns laid end to end, with a mask over what the policy sampled. Pure functions.

    turn 0   prompt [s u]      completion [a b]
    turn 1   prompt [s u a b t]  completion [c]      extends the first: one sample
    tokens   s u a b t c
    loss     . . x x . x

A turn whose prompt goes on from no earlier turn's tokens (the conversation was edited, or another one was begun beside it) starts a new
sample; so does the second of two turns that go on from the same one. Branches may be interleaved. Each sampled token is trained once.
Routing rows stay where the engine's answers have them: they are laid together once, in the packed row. Suffix: T tokens. Knows nothing of
batches or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream.types import IntArray, Rollout, Sample, Turn


def rollout_samples(rollout: Rollout, advantage: float) -> tuple[Sample, ...]:
    """The samples of a gradable rollout, in order. Turns of which no token can be trained give none: () when nothing was sampled."""
    samples = (_sample(rollout, turns, advantage) for turns in _merge(rollout.turns))
    return tuple(sample for sample in samples if sample.loss_mask_T.any())


def mask_stale(sample: Sample, version: int, max_lag: int) -> Sample:
    """The sample without loss on tokens that are more than `max_lag` versions older than `version`, which is about to be trained from."""
    stale_T = sample.loss_mask_T & (version - sample.versions_T > max_lag)
    return replace(sample, loss_mask_T=sample.loss_mask_T & ~stale_T) if stale_T.any() else sample


def _merge(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns grouped into runs in which each prompt starts with the prompt and completion before it (at the same temperature)."""
    runs: list[list[Turn]] = []
    for turn in turns:
        fitting = [run for run in runs if _extends(run[-1], turn)]
        if fitting:
            max(fitting, key=lambda run: len(run[-1].prompt_T)).append(turn)
        else:
            runs.append([turn])
    return runs


def _extends(before: Turn, turn: Turn) -> bool:
    prompt_len, tokens_N = len(before.prompt_T), before.completion.tokens_N
    end = prompt_len + len(tokens_N)
    return (
        len(turn.prompt_T) >= end
        and before.sampling.temperature == turn.sampling.temperature
        and np.array_equal(turn.prompt_T[:prompt_len], before.prompt_T)
        and np.array_equal(turn.prompt_T[prompt_len:end], tokens_N)
    )


def _sample(rollout: Rollout, turns: Sequence[Turn], advantage: float) -> Sample:
    last = turns[-1]
    tokens_T: IntArray = np.concatenate([last.prompt_T, last.completion.tokens_N]).astype(np.int32, copy=False)
    mask_T = np.zeros(len(tokens_T), np.bool_)
    logprobs_T = np.zeros(len(tokens_T), np.float32)
    versions_T = np.full(len(tokens_T), -1, np.int32)
    for turn in turns:
        start = len(turn.prompt_T)
        sampled = slice(start, start + len(turn.completion.tokens_N))
        mask_T[sampled] = True
        logprobs_T[sampled] = turn.completion.logprobs_N
        versions_T[sampled] = np.repeat([v for v, _ in turn.completion.versions], [n for _, n in turn.completion.versions])
    mask_T[:1] = False  # nothing predicts the first token
    return Sample(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        env=rollout.task.env,
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        advantage=advantage,
        reward=0.0 if rollout.reward is None else rollout.reward,
        temperature=last.sampling.temperature or 1.0,  # greedy: the logprobs are those of the untempered distribution
        routing=tuple(turn.completion.routing for turn in turns if turn.completion.routing is not None),
    )
