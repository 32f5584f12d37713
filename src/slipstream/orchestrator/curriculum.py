"""Which task of an environment to practise next. Knows task indices and pass rates only; its whole state is JSON.

`uniform` goes through all tasks in a new seeded order each epoch. `pass_rate` prefers tasks that the policy sometimes solves:
weight p (1 - p) + floor, the variance of a success (the size of the learning signal of a group), where p is a moving average.
Tasks that stay solved or hopeless are retired, and one retired task is tried again every `revisit_every` groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.config.run import CurriculumConfig

_UNKNOWN = 0.5
"""Pass rate of a task that was never played: the most interesting one."""


class Curriculum:
    """Draws task indices for one environment."""

    def __init__(self, config: CurriculumConfig, num_tasks: int, seed: int):
        self._config = config
        self._num_tasks = num_tasks
        self._seed = seed
        self._drawn = 0
        """uniform: tasks drawn so far; it names the epoch and the place in its order."""
        self._order_T: np.ndarray | None = None
        self._groups = 0
        """pass_rate: groups heard of so far."""
        self._revisits = 0
        self._pass_rate: dict[int, float] = {}
        self._streak: dict[int, int] = {}
        """Groups in a row beyond a bound."""
        self._retired: dict[int, None] = {}
        """In the order in which they wait for another try."""
        self._weights_T = np.full(num_tasks, self._weight(_UNKNOWN))

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    def next(self, rng: np.random.Generator) -> int:
        """The next task to issue."""
        if self._config.type == "uniform":
            return self._next_in_epoch()
        if self._retired and (self._revisits < self._groups // self._config.revisit_every or len(self._retired) == self._num_tasks):
            self._revisits = self._groups // self._config.revisit_every
            return self._revisit()
        cumulative_T = np.cumsum(self._weights_T)
        place = np.searchsorted(cumulative_T, rng.random() * cumulative_T[-1], side="right")
        return int(min(place, self._num_tasks - 1))

    def update(self, index: int, pass_rate: float) -> None:
        """A group of this task closed with this share of successes."""
        if self._config.type == "uniform":
            return
        self._groups += 1
        before = self._pass_rate.get(index)
        estimate = pass_rate if before is None else before + self._config.ema * (pass_rate - before)
        self._pass_rate[index] = estimate
        beyond = estimate > self._config.retire_above or estimate < self._config.retire_below
        self._streak[index] = self._streak.get(index, 0) + 1 if beyond else 0
        if self._streak[index] >= self._config.retire_after:
            self._retired.setdefault(index)
        elif not beyond:
            self._retired.pop(index, None)
        self._weights_T[index] = 0.0 if index in self._retired else self._weight(estimate)

    def state(self) -> dict[str, Any]:
        """Everything that `next` and `update` depend on (but the caller's rng), as JSON values."""
        seen = sorted(self._pass_rate)
        return {
            "drawn": self._drawn,
            "groups": self._groups,
            "revisits": self._revisits,
            "tasks": seen,
            "pass_rates": [self._pass_rate[i] for i in seen],
            "streaks": [self._streak[i] for i in seen],
            "retired": list(self._retired),
        }

    @classmethod
    def from_state(cls, config: CurriculumConfig, num_tasks: int, seed: int, state: Mapping[str, Any]) -> Curriculum:
        """Goes on exactly where `state` was taken."""
        curriculum = cls(config, num_tasks, seed)
        curriculum._drawn, curriculum._groups, curriculum._revisits = state["drawn"], state["groups"], state["revisits"]
        curriculum._pass_rate = dict(zip(state["tasks"], state["pass_rates"], strict=True))
        curriculum._streak = dict(zip(state["tasks"], state["streaks"], strict=True))
        curriculum._retired = dict.fromkeys(state["retired"])
        for index, estimate in curriculum._pass_rate.items():
            curriculum._weights_T[index] = 0.0 if index in curriculum._retired else curriculum._weight(estimate)
        return curriculum

    def _weight(self, pass_rate: float) -> float:
        return pass_rate * (1.0 - pass_rate) + self._config.floor

    def _next_in_epoch(self) -> int:
        epoch, place = divmod(self._drawn, self._num_tasks)
        if place == 0 or self._order_T is None:
            self._order_T = np.random.default_rng((self._seed, epoch)).permutation(self._num_tasks)
        self._drawn += 1
        return int(self._order_T[place])

    def _revisit(self) -> int:
        """The retired task that has waited longest; it goes to the end of the line until its group closes."""
        index = next(iter(self._retired))
        self._retired.pop(index)
        self._retired[index] = None
        return index
