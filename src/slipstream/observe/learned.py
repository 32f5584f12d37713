"""What a run learned: the same held-out tasks under the first and the last evaluated policy version, in numbers and as transcripts.

Per environment: how many tasks got better and worse, the mean of every component of the reward before and after, and a few
tasks side by side. The tasks shown are the largest gain, the middle one and the largest loss, so that they flatter nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.observe.rollouts import RolloutRecord, file_number, read_rollouts, rollout_files
from slipstream.observe.transcript import conversation, num_prompt_messages, score_line


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity: means over the rollouts that have it. None where none has it."""

    name: str
    before: float | None
    after: float | None
    num_before: int
    num_after: int

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class Pair:
    """One task under both versions, as text."""

    title: str
    prompt: str
    before: str
    """The score, as a heading."""
    before_text: str
    after: str
    after_text: str


@dataclass(frozen=True, slots=True)
class Learned:
    """One environment."""

    env: str
    version_before: int
    version_after: int
    better: int
    """Tasks whose mean reward rose."""
    worse: int
    equal: int
    rows: tuple[Row, ...]
    """'reward' first, then its components, then lengths."""
    pairs: tuple[Pair, ...]


def what_it_learned(run_folder: Path) -> list[Learned]:
    """By environment; [] before the second evaluation. Raises WireError: a file of the rollout store is damaged."""
    versions = [file_number(path) for path in rollout_files(run_folder, evals=True)]
    if len(versions) < 2:
        return []
    first, last = (
        [r for r in read_rollouts(run_folder, evals=True, step=v) if r["reward"] is not None] for v in (versions[0], versions[-1])
    )
    envs = sorted({r["env"] for r in first} & {r["env"] for r in last})
    return [
        _learned(env, versions[0], versions[-1], [r for r in first if r["env"] == env], [r for r in last if r["env"] == env])
        for env in envs
    ]


def _learned(env: str, version_before: int, version_after: int, first: list[RolloutRecord], last: list[RolloutRecord]) -> Learned:
    before, after = _by_task(first), _by_task(last)
    gains = {task: _mean_reward(after[task]) - _mean_reward(before[task]) for task in before if task in after}
    return Learned(
        env,
        version_before,
        version_after,
        better=sum(gain > 0 for gain in gains.values()),
        worse=sum(gain < 0 for gain in gains.values()),
        equal=sum(gain == 0 for gain in gains.values()),
        rows=tuple(_rows(first, last)),
        pairs=tuple(_pair(label, before[task][0], after[task][0]) for task, label in _chosen(gains)),
    )


def _chosen(gains: Mapping[str, float]) -> list[tuple[str, str]]:
    """(task, label) of those to show, best first; a gain and a loss only where there is one."""
    ranked = sorted(gains, key=lambda task: -gains[task])
    chosen: dict[str, str] = {}
    if ranked and gains[ranked[0]] > 0:
        chosen[ranked[0]] = "largest gain"
    if ranked and gains[ranked[-1]] < 0:
        chosen[ranked[-1]] = "largest loss"
    if ranked:
        chosen.setdefault(ranked[len(ranked) // 2], "middle")
    return sorted(chosen.items(), key=lambda item: ranked.index(item[0]))


def _rows(first: Sequence[RolloutRecord], last: Sequence[RolloutRecord]) -> Iterable[Row]:
    names = sorted({name for record in (*first, *last) for name in record["reward_parts"]})
    yield _row("reward", first, last, lambda record: record["reward"])
    for name in names:
        yield _row(name, first, last, lambda record, name=name: record["reward_parts"].get(name))
    yield _row("turns", first, last, lambda record: len(record["tokens"]))
    yield _row("sampled tokens", first, last, lambda record: sum(map(len, record["tokens"])))


def _row(name: str, first: Sequence[RolloutRecord], last: Sequence[RolloutRecord], value: Callable[[RolloutRecord], float | None]) -> Row:
    before, after = ([v for record in records if (v := value(record)) is not None] for records in (first, last))
    return Row(name, _mean(before), _mean(after), len(before), len(after))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _pair(label: str, before: RolloutRecord, after: RolloutRecord) -> Pair:
    start = num_prompt_messages(before)
    return Pair(
        title=f"{label}: {before['task_id']}",
        prompt=conversation(before["messages"][:start]),
        before=f"before: policy version {before['step']}, {score_line(before)}",
        before_text=conversation(before["messages"][start:]),
        after=f"after: policy version {after['step']}, {score_line(after)}",
        after_text=conversation(after["messages"][num_prompt_messages(after) :]),
    )


def _by_task(records: Iterable[RolloutRecord]) -> dict[str, list[RolloutRecord]]:
    found: dict[str, list[RolloutRecord]] = {}
    for record in records:
        found.setdefault(record["task_id"], []).append(record)
    return found


def _mean_reward(records: Sequence[RolloutRecord]) -> float:
    return float(np.mean([record["reward"] for record in records]))
