"""Which trajectories a report shows: the best, the worst and random ones of the last steps, and the same tasks before and after."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.observe.rollouts import RolloutRecord, format_rollout, read_rollouts, rollout_files

LAST_STEPS = 3
"""Training rollouts are picked from this many of the last steps."""
RANDOM = 2
PAIRS = 3


class Pick(NamedTuple):
    """One transcript to show."""

    label: str
    text: str


def pick_recent(run_folder: Path) -> list[Pick]:
    """Best, worst and random rollouts with a reward, of the last steps.

    Raises WireError: a file of the rollout store is damaged.
    """
    steps = [int(path.stem.removeprefix("step_")) for path in rollout_files(run_folder)][-LAST_STEPS:]
    records = [record for step in steps for record in read_rollouts(run_folder, step=step) if record["reward"] is not None]
    if not records:
        return []
    ranked = sorted(records, key=lambda record: record["reward"])
    chosen = [("worst", ranked[0]), ("best", ranked[-1])]
    rest = [record for record in records if record["id"] not in {ranked[0]["id"], ranked[-1]["id"]}]
    chosen += [("random", record) for record in random.Random(0).sample(rest, min(RANDOM, len(rest)))]
    return [Pick(label, format_rollout(record)) for label, record in chosen]


def pick_before_after(run_folder: Path) -> list[tuple[Pick, Pick]]:
    """Held-out tasks under the first and the last evaluated version: those whose reward changed most, and one that got worse if any did.

    Raises WireError: a file of the rollout store is damaged.
    """
    versions = [int(path.stem.removeprefix("eval_v")) for path in rollout_files(run_folder, evals=True)]
    if len(versions) < 2:
        return []
    first, last = (_by_task(list(read_rollouts(run_folder, evals=True, step=version))) for version in (versions[0], versions[-1]))
    shared = [task for task in first if task in last]
    gains = {task: last[task]["reward"] - first[task]["reward"] for task in shared}
    ranked = sorted(shared, key=lambda task: gains[task])
    chosen = ranked[::-1][:PAIRS]
    if ranked and gains[ranked[0]] < 0 and ranked[0] not in chosen:
        chosen[-1] = ranked[0]
    return [(_pick("before", first[task]), _pick("after", last[task])) for task in chosen]


def _by_task(records: Sequence[RolloutRecord]) -> dict[str, RolloutRecord]:
    """The first rollout with a reward of each task."""
    found: dict[str, RolloutRecord] = {}
    for record in records:
        if record["reward"] is not None:
            found.setdefault(record["task_id"], record)
    return found


def _pick(label: str, record: RolloutRecord) -> Pick:
    return Pick(f"{label}: policy version {record['version_start']}", format_rollout(record))
