"""Which trajectories a report shows: the best, the worst and random ones of the last steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from slipstream.observe.rollouts import file_number, format_rollout, read_rollouts, rollout_files

LAST_STEPS = 3
"""Training rollouts are picked from this many of the last steps."""
RANDOM = 2


class Pick(NamedTuple):
    """One transcript to show."""

    label: str
    text: str


def pick_recent(run_folder: Path) -> list[Pick]:
    """Best, worst and random rollouts with a reward, of the last steps.

    Raises WireError: a file of the rollout store is damaged.
    """
    steps = [file_number(path) for path in rollout_files(run_folder)][-LAST_STEPS:]
    records = [record for step in steps for record in read_rollouts(run_folder, step=step) if record["reward"] is not None]
    if not records:
        return []
    ranked = sorted(records, key=lambda record: record["reward"])
    chosen = [("worst", ranked[0]), ("best", ranked[-1])]
    rest = [record for record in records if record["id"] not in {ranked[0]["id"], ranked[-1]["id"]}]
    chosen += [("random", record) for record in random.Random(0).sample(rest, min(RANDOM, len(rest)))]
    return [Pick(label, format_rollout(record)) for label, record in chosen]
