"""Rollouts and metrics that are kept for the test to examine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.fakes.world import HEALTHY, Faults
from slipstream.types import Rollout


class FakeStore:
    """Keeps ids only."""

    def __init__(self, rng: random.Random, faults: Faults = HEALTHY):
        self.rollouts: dict[int, list[str]] = {}
        self.evals: dict[int, list[Rollout]] = {}
        self.oldest_weights = 0
        self._rng = rng
        self._faults = faults

    async def write_rollouts(
        self, step: int, rollouts: Sequence[Rollout], advantages: Mapping[str, float], dropped: Mapping[str, str]
    ) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, self._faults.store_slow_s))
        self.rollouts[step] = [rollout.id for rollout in rollouts]

    async def write_eval(self, version: int, rollouts: Sequence[Rollout]) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, self._faults.store_slow_s))
        self.evals[version] = list(rollouts)

    async def retire_weights(self, oldest: int) -> None:
        self.oldest_weights = max(self.oldest_weights, oldest)


class FakeMetrics:
    """Keeps everything."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append((step, dict(values)))

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))
