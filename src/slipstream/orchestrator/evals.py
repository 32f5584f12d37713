"""Online evaluation of one policy version on held-out tasks: avg@k and pass@k for each environment.

The publish of newer versions waits while an evaluation runs (docs/decisions/0002-evals-pin-a-version.md), so that every token of it
comes from one version. A rollout in which another version had a part is played again. Evaluation rollouts share the engine with
training and count towards its concurrency limit, but are not in the ledger: they are never trained.

`is_due`, `is_pinned` and `score` are pure functions. Knows nothing of batches or lag.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from slipstream.config.envs import EnvConfig, EvalConfig
from slipstream.config.serve import SamplingConfig
from slipstream.envs.base import count_tasks
from slipstream.envs.play import greedy
from slipstream.orchestrator.dispatch import CANCEL_GRACE_S, Flight, draw
from slipstream.ports import Env, Player
from slipstream.types import Outcome, Rollout, Task

TRIES = 4
"""Plays of one evaluation rollout before it is left out: failures of infrastructure and other versions are not the policy's fault."""
FINAL = (Outcome.env_error, Outcome.reward_error)
"""Failures of the environment itself: another play would meet them again."""
RETRY_DELAYS_S = (1.0, 4.0, 16.0)
"""Together longer than a supervisor needs to bring an engine back."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One environment at one version."""

    avg_at_k: float
    """Mean over tasks of the share of successful rollouts."""
    pass_at_k: float
    """Share of tasks with at least one success."""
    reward_mean: float
    samples: int
    """Rollouts that were graded."""
    ungraded: int
    """Rollouts without a grade after all tries (errors, deadlines): in no average."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def is_due(version: int, last_eval: int, config: EvalConfig, final: bool = False) -> bool:
    """Whether to evaluate the version that has just become live. `last_eval`: newest evaluated version, -1 for none."""
    if config.tasks == 0 or version <= last_eval:
        return False
    if final or (last_eval < 0 and not config.skip_first):
        return True
    return bool(config.interval) and version // config.interval > max(last_eval, 0) // config.interval


def eval_sampling(env: EnvConfig, config: EvalConfig) -> SamplingConfig:
    """The environment's limits at the evaluation's temperature; greedy at 0."""
    if config.temperature == 0:
        return greedy(env.sampling)
    return env.sampling.replace(temperature=config.temperature)


def is_pinned(rollout: Rollout, version: int) -> bool:
    """Whether every token of the rollout was sampled by `version`."""
    return all(v == version for turn in rollout.turns for v, n in turn.completion.versions if n)


def score(rollouts: Sequence[Rollout], success_reward: float) -> EvalResult:
    """Averages over one environment's rollouts. Those without a reward are counted, and otherwise left out."""
    by_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_task.setdefault(rollout.task.id, []).append(rollout.reward)
    rewards = [reward for task in by_task.values() for reward in task]
    shares = [sum(reward >= success_reward for reward in task) / len(task) for task in by_task.values()]
    return EvalResult(
        avg_at_k=sum(shares) / len(shares) if shares else 0.0,
        pass_at_k=sum(share > 0 for share in shares) / len(shares) if shares else 0.0,
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        samples=len(rewards),
        ungraded=len(rollouts) - len(rewards),
    )


class Evaluator:
    """Plays evaluations, one at a time."""

    def __init__(
        self,
        envs: Sequence[tuple[EnvConfig, Env, Player]],
        config: EvalConfig,
        limit: Callable[[], int],
        wall: Callable[[], float],
        grace_s: float = CANCEL_GRACE_S,
        tries: int = TRIES,
    ):
        """`limit`: rollouts that may run at once, now. `wall`: seconds since the epoch. `tries`: plays of a rollout without a grade."""
        self.in_flight = 0
        self._envs = envs
        self._config = config
        self._limit = limit
        self._wall = wall
        self._grace_s = grace_s
        self._tries = tries

    async def run(self, version: int) -> tuple[dict[str, EvalResult], list[Rollout]]:
        """Evaluate `version`, which is live and stays so. Results by environment, and all rollouts.

        Waits for: its own rollouts, each of which ends by `rollout_timeout_s` and is tried `tries` times. Where an environment got no grade
        at all, everything is played again, for as long as the caller waits: no grade is not a score of 0. Unless it failed by itself
        every time: its result then has no `samples`.
        """
        while True:
            results, rollouts = await self.play_all(version)
            if all(result.samples or _broken(rollouts, label) for label, result in results.items()):
                return results, rollouts
            await asyncio.sleep(RETRY_DELAYS_S[0])

    async def play_all(self, version: int) -> tuple[dict[str, EvalResult], list[Rollout]]:
        """As `run`, once: an environment may be left without a grade."""
        jobs: deque[tuple[EnvConfig, Player, Task, str]] = deque()
        for config, env, player in self._envs:
            for index in range(min(self._config.tasks, count_tasks(env, "eval"))):
                task = draw(env, "eval", index)
                jobs.extend((config, player, task, f"e{version:06d}-{config.label}-{index}-{k}") for k in range(self._config.samples))
        rollouts: list[Rollout] = []

        async def work() -> None:
            while jobs:
                rollouts.append(await self._play(*jobs.popleft(), version))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._limit(), len(jobs))):
                tasks.create_task(work())
        by_env = {config.label: [r for r in rollouts if r.task.env == env.name] for config, env, _ in self._envs}
        return {label: score(own, self._config.success_reward) for label, own in by_env.items()}, rollouts

    async def _play(self, config: EnvConfig, player: Player, task: Task, id: str, version: int) -> Rollout:
        """One rollout with a grade, all by `version`; or the last try without, or the one that the environment itself failed."""
        attempt = 0
        while True:
            rollout = await self._fly(config, player, task, f"{id}-{attempt}", version)
            if rollout.outcome in FINAL or (rollout.outcome.gradable and is_pinned(rollout, version)):
                return rollout
            attempt += 1
            if attempt == self._tries:
                return _ungraded(rollout)
            await asyncio.sleep(RETRY_DELAYS_S[attempt - 1])

    async def _fly(self, config: EnvConfig, player: Player, task: Task, id: str, version: int) -> Rollout:
        blank = Rollout(id, task, f"e{version:06d}", Outcome.cut, version_start=version, started_s=self._wall())
        flight = Flight(player(task, id, blank.group_id, version), blank, config.rollout_timeout_s, self._grace_s)
        self.in_flight += 1
        try:
            return await asyncio.shield(flight.ended)
        finally:
            self.in_flight -= 1
            flight.cancel(Outcome.cut)


def _broken(rollouts: Sequence[Rollout], env: str) -> bool:
    """Whether the environment failed by itself in every rollout."""
    return all(rollout.outcome in FINAL for rollout in rollouts if rollout.task.env == env)


def _ungraded(rollout: Rollout) -> Rollout:
    """A rollout whose last try was graded, but in part by another version, has no grade either."""
    if not rollout.outcome.gradable:
        return rollout
    return replace(rollout, outcome=Outcome.infra_error, reward=None, error="another policy version had a part in it")
