"""An environment and a player of it that are slow, hang, raise, or ignore their cancellation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.errors import EngineUnavailable, EnvError
from slipstream.fakes.world import FOREVER_S, HEALTHY, Faults, Trace
from slipstream.ports import Engine, Policy
from slipstream.types import GenerateRequest, Outcome, Rollout, Sampling, Task, Turn


@dataclass(slots=True)
class FakePlayed:
    messages: Sequence[dict]
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)


class FakeEnv:
    """Tasks without content."""

    def __init__(self, name: str, num_tasks: int = 1000):
        self.name = name
        self._num_tasks = num_tasks

    def num_tasks(self, split: str) -> int:
        return self._num_tasks

    def task(self, split: str, index: int) -> Task:
        return Task(f"{self.name}/{split}/{index}", self.name, index)

    async def play(self, task: Task, policy: Policy) -> FakePlayed:
        return FakePlayed([await policy.reply([])], 1.0)


class FakePlayer:
    """One to three turns of an engine with an environment between them; a coin for a reward."""

    def __init__(
        self,
        engine: Engine,
        rng: random.Random,
        faults: Faults = HEALTHY,
        trace: Trace | None = None,
        reward: Callable[[random.Random], float] = lambda rng: float(rng.random() < 0.5),
        turn_timeout_s: float = 10.0,
    ):
        self._engine = engine
        self._rng = rng
        self._faults = faults
        self._trace = trace or Trace()
        self._reward = reward
        self._turn_timeout_s = turn_timeout_s

    async def __call__(self, task: Task, rollout_id: str, group_id: str, version_start: int) -> Rollout:
        swallows = self._rng.random() < self._faults.env_swallow
        try:
            return await self._play(task, rollout_id, group_id, version_start)
        except asyncio.CancelledError:
            if not swallows:
                raise
            self._trace(f"swallowed {rollout_id}")
            await asyncio.sleep(300.0)
            return Rollout(rollout_id, task, group_id, Outcome.completed, reward=1.0, version_start=version_start)

    async def _play(self, task: Task, rollout_id: str, group_id: str, version_start: int) -> Rollout:
        rollout = Rollout(rollout_id, task, group_id, Outcome.completed, version_start=version_start)
        turns: list[Turn] = []
        prompt_T = np.arange(5, dtype=np.int32)
        sampling = Sampling(max_tokens=12)
        try:
            for turn in range(self._rng.choice((1, 1, 2, 3))):
                await self._environment()
                request = GenerateRequest(f"{rollout_id}/{turn}", prompt_T, sampling, max(version_start, 0))
                async with asyncio.timeout(self._turn_timeout_s):
                    completion = await self._engine.generate(request)
                turns.append(Turn(prompt_T, completion, sampling))
                prompt_T = np.concatenate([prompt_T, completion.tokens_N, np.array([7, 8], np.int32)])
        except EnvError as error:
            return replace(rollout, outcome=Outcome.env_error, error=str(error), turns=tuple(turns))
        except (EngineUnavailable, TimeoutError) as error:
            return replace(rollout, outcome=Outcome.infra_error, error=str(error), turns=tuple(turns))
        self._trace(f"played {rollout_id}")
        return replace(rollout, turns=tuple(turns), reward=self._reward(self._rng))

    async def _environment(self) -> None:
        seconds = self._rng.uniform(0.01, 0.3)
        if self._rng.random() < self._faults.env_slow:
            seconds *= 20
        if self._rng.random() < self._faults.env_hang:
            seconds = FOREVER_S
        await asyncio.sleep(seconds)
        if self._rng.random() < self._faults.env_raise:
            raise EnvError("the environment fell over")
