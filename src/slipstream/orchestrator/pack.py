"""Samples to packed rows, and rows to a batch. Pure functions.

Suffixes: T tokens of a row, D documents (samples) of a row, S samples of the batch, L MoE layers, K experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.algorithms.packing import assign
from slipstream.errors import StateError
from slipstream.transport.buffers import room
from slipstream.types import Batch, BoolArray, MicroBatch, Routing, Sample


def pack(samples: Sequence[Sample], row_tokens: int) -> tuple[MicroBatch, ...]:
    """Lay the samples end to end in as few rows of at most `row_tokens` tokens as best-fit finds, balanced by tokens.

    Raises StateError when a sample is longer than a row: it should have been truncated at model.seq_len.
    """
    lengths_S = np.array([sample.num_tokens for sample in samples], np.int64)
    for sample, length in zip(samples, lengths_S.tolist(), strict=True):
        if length > row_tokens:
            raise StateError(
                f"sample of rollout {sample.rollout_id} has {length} tokens and a row holds {row_tokens} (trainer.row_tokens): "
                "a sample is never cut; raise trainer.row_tokens or lower model.seq_len"
            )
    return tuple(_row(samples, index_D.tolist()) for index_D in assign(lengths_S, row_tokens))


def make_batch(step: int, samples: Sequence[Sample], row_tokens: int, orchestrator_state: Mapping[str, Any]) -> Batch:
    """The batch of optimizer step `step`. Raises StateError: nothing to train, or a sample longer than a row."""
    loss_tokens = sum(int(sample.loss_mask_T.sum()) for sample in samples)
    if not loss_tokens:
        raise StateError(f"batch {step}: {len(samples)} samples without a single token to train")
    return Batch(
        step=step,
        micro_batches=pack(samples, row_tokens),
        loss_tokens=loss_tokens,
        rollout_ids=tuple(sample.rollout_id for sample in samples),
        rewards_S=np.array([sample.reward for sample in samples], np.float32),
        advantages_S=np.array([sample.advantage for sample in samples], np.float32),
        orchestrator_state=orchestrator_state,
    )


def routing_bytes(samples: Sequence[Sample]) -> int:
    """Size of their routing rows: what makes packing slow."""
    return sum(part.ids_TLK.nbytes for sample in samples for part in sample.routing)


def _row(samples: Sequence[Sample], index_D: list[int]) -> MicroBatch:
    row = [samples[i] for i in index_D]
    lengths_D = np.array([sample.num_tokens for sample in row], np.int64)
    starts_D = np.concatenate([[0], np.cumsum(lengths_D)]).astype(np.int32)
    routing_TLK, routing_valid_T = _routing_rows(row, starts_D)

    def joined(part: Callable[[Sample], np.ndarray]) -> np.ndarray:
        return np.concatenate([part(sample) for sample in row])

    def spread(values: list[float] | list[int], dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype), lengths_D)

    return MicroBatch(
        tokens_T=joined(lambda sample: sample.tokens_T),
        positions_T=np.arange(starts_D[-1], dtype=np.int32) - np.repeat(starts_D[:-1], lengths_D),
        doc_starts_D=starts_D,
        loss_mask_T=joined(lambda sample: sample.loss_mask_T),
        logprobs_T=joined(lambda sample: sample.logprobs_T),
        versions_T=joined(lambda sample: sample.versions_T),
        advantages_T=spread([sample.advantage for sample in row], np.float32),
        temperature_T=spread([sample.temperature for sample in row], np.float32),
        sample_T=spread(index_D, np.int32),
        routing_TLK=routing_TLK,
        routing_valid_T=routing_valid_T,
    )


def _routing_rows(row: Sequence[Sample], starts_D: np.ndarray) -> tuple[Any, BoolArray | None]:
    """(expert ids, whether they are known) of the whole row; zeros, and not valid, where no turn brought a row. None: no sample has any."""
    like = next((part.ids_TLK for sample in row for part in sample.routing), None)
    if like is None:
        return None, None
    ids_TLK = _zeros((int(starts_D[-1]), *like.shape[1:]), like.dtype)
    valid_T = np.zeros(len(ids_TLK), np.bool_)
    for sample, start in zip(row, starts_D.tolist(), strict=False):
        for part in sample.routing:
            place = slice(start + part.start, start + min(part.start + len(part.valid_T), sample.num_tokens))
            _lay(ids_TLK[place], valid_T[place], part)
    return ids_TLK, valid_T


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """In memory that is used again: as large as anything that a step allocates."""
    array = np.frombuffer(room(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    array[:] = 0
    return array


def _lay(ids_RLK: np.ndarray, valid_R: BoolArray, part: Routing) -> None:
    """Fill in what is not known yet: the first row for a token was in use when the tokens after it were sampled."""
    new_R = part.valid_T[: len(valid_R)] & ~valid_R
    if new_R.all():  # one copy, without the interpreter
        ids_RLK[:] = part.ids_TLK[: len(new_R)]
    else:
        ids_RLK[new_R] = part.ids_TLK[: len(new_R)][new_R]
    valid_R |= new_R
