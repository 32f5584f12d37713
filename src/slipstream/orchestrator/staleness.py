"""What is too old to train, what goes into a batch, and how much may be issued: pure functions over ready rollouts.

lag(token) = version that the batch trains from - version that sampled the token. Step n trains from version n - 1, so step n may train
tokens of version `oldest_version(n, max_off_policy_steps)` and newer. The same bound is used at four places: before a rollout is issued
(`room`), while it plays (dispatch.cancel_stale), while it waits (`sweep`) and once more over the finished batch (`check_lag`).

A rollout is never split over batches. `size` is a number of samples or of tokens, as the batch is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from slipstream.config.run import BySamples, ByTokens
from slipstream.errors import StateError
from slipstream.orchestrator.samples import mask_stale, rollout_samples
from slipstream.types import Batch, Rollout, Sample


@dataclass(frozen=True, slots=True)
class Ready:
    """A rollout with an advantage, waiting for its batch."""

    rollout_id: str
    env: str
    samples: tuple[Sample, ...]
    version_min: int
    """Oldest version among the tokens that it would train."""
    reward: float = 0.0
    num_turns: int = 1
    num_sampled: int = 0


def as_ready(env: str, rollout: Rollout, advantage: float) -> Ready | None:
    """The rollout as it waits for its batch; None when it has no token to train."""
    samples = rollout_samples(rollout, advantage)
    oldest = version_min(samples)
    if oldest is None:
        return None
    return Ready(rollout.id, env, samples, oldest, rollout.reward or 0.0, len(rollout.turns), rollout.num_sampled)


def oldest_version(step: int, max_lag: int) -> int:
    """The oldest version whose tokens step `step` may train."""
    return step - 1 - max_lag


def version_min(samples: Sequence[Sample]) -> int | None:
    """Oldest version that sampled a trainable token; None when no token is trainable."""
    oldest = [int(s.versions_T[s.loss_mask_T].min()) for s in samples if s.loss_mask_T.any()]
    return min(oldest, default=None)


def batch_size(batch: BySamples | ByTokens) -> int:
    return batch.samples if isinstance(batch, BySamples) else batch.tokens


def size(ready: Ready, batch: BySamples | ByTokens) -> int:
    """What a rollout adds to a batch: samples or tokens."""
    return len(ready.samples) if isinstance(batch, BySamples) else sum(s.num_tokens for s in ready.samples)


def room(live: int, step: int, max_lag: int, batch: BySamples | ByTokens, outstanding: float) -> float:
    """How much (samples or tokens) may still be issued at live version `live` when `step` is the next batch to be cut.

    Everything outstanding (in flight, or ready) goes into the batches `step .. live + max_lag + 1` or none: a rollout issued now, at
    version `live`, is too old for any later one. Shipped batches no longer count, so this is the rule
    'issued and not dropped <= (live + max_lag + 1) * batch size'. With max_lag = 0 it is exactly one batch per version.
    """
    return (live + max_lag + 1 - (step - 1)) * batch_size(batch) - outstanding


def sweep(ready: Sequence[Ready], step: int, max_lag: int, mask: bool) -> tuple[list[Ready], list[Ready]]:
    """(what step `step` may train, what is too old). With `mask`, too old tokens lose their loss and the rest of the rollout stays."""
    oldest = oldest_version(step, max_lag)
    kept: list[Ready] = []
    stale: list[Ready] = []
    for item in ready:
        if item.version_min >= oldest:
            kept.append(item)
        elif mask and (fresh := _mask(item, step, max_lag)) is not None:
            kept.append(fresh)
        else:
            stale.append(item)
    return kept, stale


def _mask(item: Ready, step: int, max_lag: int) -> Ready | None:
    samples = (mask_stale(sample, step - 1, max_lag) for sample in item.samples)
    samples = tuple(sample for sample in samples if sample.loss_mask_T.any())
    oldest = version_min(samples)
    return None if oldest is None else replace(item, samples=samples, version_min=oldest)


def cut(ready: Sequence[Ready], batch: BySamples | ByTokens) -> tuple[list[Ready], list[Ready]] | None:
    """(one batch, what is left) or None when there is not enough.

    The oldest version goes first, and within a version what was ready first. The rollout that brings the batch to its size closes it.
    """
    wanted = batch_size(batch)
    if sum(size(item, batch) for item in ready) < wanted:
        return None
    queue = sorted(ready, key=lambda item: item.version_min)
    have = 0
    for i, item in enumerate(queue):
        have += size(item, batch)
        if have >= wanted:
            return queue[: i + 1], queue[i + 1 :]
    return None


def check_lag(batch: Batch, max_lag: int) -> dict[int, int]:
    """Trainable tokens by lag: {lag: tokens}. Raises StateError when a token is older than allowed, or newer than possible."""
    versions = np.concatenate([m.versions_T[m.loss_mask_T] for m in batch.micro_batches] or [np.zeros(0, np.int32)])
    lags, counts = np.unique(batch.version - versions, return_counts=True)
    if len(lags) and (lags[-1] > max_lag or lags[0] < 0):
        raise StateError(f"batch {batch.step} has tokens with lag {lags.tolist()}; allowed are 0 to {max_lag}")
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))


def batch_hash(batch: Batch) -> str:
    """16 hex digits over the rollouts and the tokens of a batch, in order."""
    digest = xxhash.xxh3_64(" ".join(batch.rollout_ids).encode())
    for row in batch.micro_batches:
        digest.update(row.tokens_T.tobytes())
        digest.update(row.versions_T.tobytes())
    return digest.hexdigest()
