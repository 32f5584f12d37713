"""Rollouts as parquet columns: the schema of the rollout store. Token columns are built from whole arrays, never token by token.

A turn's prompt nearly always is the turn before, whole, plus a little (a tool's answer). Only the new part is stored, with the number
of tokens that it follows on: a rollout of many turns takes space in proportion to its length, not to its square.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from slipstream.observe.metrics import plain
from slipstream.types import Rollout, Turn

SCHEMA = b"2"
"""In the metadata of every file, under 'slipstream_schema'."""


def to_table(step: int, rollouts: Sequence[Rollout], advantages: Mapping[str, float], dropped: Mapping[str, str]) -> pa.Table:
    """One row a rollout. By rollout id: `advantages` of the trained, reasons of the `dropped`."""
    columns = _rollout_columns(step, rollouts, advantages, dropped) | _turn_columns(rollouts)
    return pa.table(columns).replace_schema_metadata({b"slipstream_schema": SCHEMA})


def _rollout_columns(
    step: int, rollouts: Sequence[Rollout], advantages: Mapping[str, float], dropped: Mapping[str, str]
) -> dict[str, pa.Array]:
    def column(kind: pa.DataType, values: list) -> pa.Array:
        return pa.array(values, kind)

    text, integer, real = pa.string(), pa.int32(), pa.float64()
    return {
        "step": column(integer, [step] * len(rollouts)),
        "id": column(text, [r.id for r in rollouts]),
        "group_id": column(text, [r.group_id for r in rollouts]),
        "env": column(text, [r.task.env for r in rollouts]),
        "task_id": column(text, [r.task.id for r in rollouts]),
        "task_index": column(integer, [r.task.index for r in rollouts]),
        "outcome": column(text, [str(r.outcome) for r in rollouts]),
        "dropped": column(text, [dropped.get(r.id, "") for r in rollouts]),
        "reward": column(real, [r.reward for r in rollouts]),
        "advantage": column(real, [advantages.get(r.id) for r in rollouts]),
        "error": column(text, [r.error for r in rollouts]),
        "version_start": column(integer, [r.version_start for r in rollouts]),
        "version_min": column(integer, [r.version_min for r in rollouts]),
        "version_max": column(integer, [_version_max(r) for r in rollouts]),
        "started_s": column(real, [r.started_s for r in rollouts]),
        "duration_s": column(real, [r.duration_s for r in rollouts]),
        "payload": column(text, [_json(r.task.payload) for r in rollouts]),
        "reward_parts": column(text, [_json(r.reward_parts) for r in rollouts]),
        "messages": column(text, [_json(r.messages) for r in rollouts]),
    }


def _turn_columns(rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    turns = [turn for r in rollouts for turn in r.turns]
    by_rollout = _offsets([len(r.turns) for r in rollouts])

    def tokens(arrays: list[np.ndarray], dtype: type) -> pa.Array:
        values = np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
        per_turn = pa.ListArray.from_arrays(_offsets([len(a) for a in arrays]), pa.array(values))
        return pa.ListArray.from_arrays(by_rollout, per_turn)

    def each(kind: pa.DataType, values: list) -> pa.Array:
        return pa.ListArray.from_arrays(by_rollout, pa.array(values, kind))

    prompts = [part for r in rollouts for part in _new_parts(r.turns)]
    pair = pa.list_(pa.int32(), 2)
    return {
        "prompt_kept": each(pa.int32(), [kept for kept, _ in prompts]),
        "prompt_new": tokens([new for _, new in prompts], np.int32),
        "tokens": tokens([turn.completion.tokens_N for turn in turns], np.int32),
        "logprobs": tokens([turn.completion.logprobs_N for turn in turns], np.float32),
        "versions": each(pa.list_(pair), [[list(segment) for segment in turn.completion.versions] for turn in turns]),
        "finish_reason": each(pa.string(), [turn.completion.finish_reason for turn in turns]),
        "temperature": each(pa.float64(), [turn.sampling.temperature for turn in turns]),
        "cached_tokens": each(pa.int32(), [turn.completion.cached_tokens for turn in turns]),
        "kv_age": each(pa.int32(), [turn.completion.kv_age for turn in turns]),
        **{name: each(pa.float64(), [_timing(turn, name) for turn in turns]) for name in ("queued_s", "prefill_s", "decode_s")},
    }


def whole_prompts(kept: Sequence[int], new: Sequence[list[int]], tokens: Sequence[list[int]]) -> list[list[int]]:
    """The prompt of each turn of one rollout, from its stored parts."""
    prompts: list[list[int]] = []
    before: list[int] = []
    for count, part, sampled in zip(kept, new, tokens, strict=True):
        prompts.append(before[:count] + part)
        before = prompts[-1] + sampled
    return prompts


def _new_parts(turns: Sequence[Turn]) -> Iterator[tuple[int, np.ndarray]]:
    """For each turn: how many tokens its prompt takes over from the turn before, prompt and completion, and the rest of it."""
    before = np.zeros(0, dtype=np.int32)
    for turn in turns:
        kept = len(before) if np.array_equal(turn.prompt_T[: len(before)], before) else 0
        yield kept, turn.prompt_T[kept:]
        before = np.concatenate([turn.prompt_T, turn.completion.tokens_N])


def _timing(turn: Turn, name: str) -> float:
    return getattr(turn.completion.timings, name)


def _version_max(rollout: Rollout) -> int:
    return max((v for turn in rollout.turns for v, n in turn.completion.versions if n), default=rollout.version_start)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=plain).decode()
