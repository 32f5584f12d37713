"""Small rollouts, samples and flights for the tests of this folder."""

import asyncio

import numpy as np

from slipstream.orchestrator.staleness import Ready
from slipstream.types import Completion, Outcome, Rollout, Sample, Sampling, Task, Turn

TASK = Task("env/train/0", "env", 0)


def rollout(id="g1-0", reward=1.0, outcome=Outcome.completed, versions=((0, 3),), task=TASK) -> Rollout:
    count = sum(n for _, n in versions)
    completion = Completion(id, np.arange(count, dtype=np.int32), np.full(count, -1.0, np.float32), tuple(versions), "stop")
    turn = Turn(np.arange(4, dtype=np.int32), completion, Sampling())
    gradable = outcome.gradable
    return Rollout(id, task, id.split("-")[0], outcome, (turn,) if gradable else (), reward=reward if gradable else None)


def sample(versions, tokens=None) -> Sample:
    versions_T = np.array(versions, np.int32)
    zeros_T = np.zeros(len(versions_T), np.float32)
    return Sample("r", "g", "env", np.zeros(len(versions_T), np.int32), versions_T >= 0, zeros_T, versions_T, 1.0, 1.0)


def ready(id, versions) -> Ready:
    one = sample(versions)
    return Ready(id, "env", (one,), min(v for v in versions if v >= 0))


def player(seconds=1.0, **fields):
    """Plays for some seconds and returns `rollout(id, **fields)`."""

    async def play(task, rollout_id, group_id, version_start):
        await asyncio.sleep(seconds)
        return rollout(rollout_id, **fields)

    return play
