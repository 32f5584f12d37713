"""Groups: all rollouts of one task. `play_group` closes one; `judge` says what of it is trained, with which advantage, and what is not.

Also which environment the next group is for (`next_env`). All but `play_group` are pure functions.
Knows nothing of batches, of lag, or of how a rollout is played.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.algorithms.advantages import compute
from slipstream.config.envs import EnvConfig
from slipstream.config.run import FilterConfig, OrchestratorConfig
from slipstream.orchestrator.dispatch import Flight
from slipstream.orchestrator.filters import group_reason, rollout_reason
from slipstream.types import Group, Outcome, Rollout, Task


class Open:
    """A group whose rollouts are being played."""

    def __init__(self, id: str, task: Task, size: int, issue: Callable[[str, int], Flight]):
        """`issue(rollout id, attempt)` starts one rollout of the task; `size` of them start now."""
        self.id = id
        self.task = task
        self.rollouts: list[Rollout] = []
        """Ended, in order of their end. Those that were issued again are not among them."""
        self.num_gradable = 0
        self._issue = issue
        self._issued = 0
        self.pending: list[Flight] = [self.issue() for _ in range(size)]

    def issue(self, attempt: int = 0) -> Flight:
        self._issued += 1
        return self._issue(f"{self.id}-{self._issued - 1}", attempt)

    def add(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)
        self.num_gradable += rollout.outcome.gradable


async def play_group(
    group: Open, config: OrchestratorConfig, ended: Callable[[Rollout], None], may_retry: Callable[[], bool] = lambda: True
) -> Group:
    """Task -> Group: wait until all rollouts ended, or for `group_grace_s` after a quorum of gradable ones; the rest is cut.

    Waits for: the pending flights, each of which ends by its own deadline. Woken by: their ends, and the grace. Calls `ended` once for
    each rollout. One that failed for reasons of infrastructure is issued again, `infra_retries` times, while it `may_retry`.
    """
    loop = asyncio.get_running_loop()
    quorum = max(math.ceil(config.group_quorum * len(group.pending)), config.min_group)  # fewer would be dropped as too small
    closes_at, cutting = None, False
    while group.pending:
        timeout = None if closes_at is None or cutting else max(0.0, closes_at - loop.time())
        await asyncio.wait([flight.ended for flight in group.pending], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        landed = [flight for flight in group.pending if flight.ended.done()]
        group.pending = [flight for flight in group.pending if not flight.ended.done()]
        for flight in landed:
            rollout = flight.ended.result()
            ended(rollout)
            if rollout.outcome is Outcome.infra_error and flight.attempt < config.infra_retries and may_retry():
                group.pending.append(group.issue(flight.attempt + 1))
            else:
                group.add(rollout)
        if closes_at is None and group.num_gradable >= quorum:
            closes_at = loop.time() + config.group_grace_s
        cutting = closes_at is not None and loop.time() >= closes_at
        if cutting:
            for flight in group.pending:
                flight.cancel(Outcome.cut)
    return Group(group.id, group.task, tuple(group.rollouts))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to a closed group."""

    trained: tuple[tuple[Rollout, float], ...]
    """Rollouts with their advantages."""
    dropped: Mapping[str, str]
    """Gradable rollout -> reason."""
    caught: Mapping[str, int] = field(default_factory=dict)
    """Filter -> rollouts that it caught, enforced or not."""


def judge(group: Group, env: EnvConfig, filters: Sequence[FilterConfig], min_group: int, seq_len: int) -> Verdict:
    """Advantages over the gradable rollouts alone, so a partial group has its own baseline; then the filters.

    A rollout that a filter drops still counts in the baseline: its reward is real.
    """
    rollouts = group.gradable
    if len(rollouts) < min_group:
        return Verdict((), {rollout.id: "small_group" for rollout in rollouts})
    rewards_S = np.array([rollout.reward for rollout in rollouts], np.float64)
    lengths_S = np.array([rollout.num_sampled for rollout in rollouts], np.int32)
    advantages_S = compute(env.advantage, rewards_S, lengths_S, seq_len)  # type: ignore[arg-type]
    dropped: dict[str, str] = {}
    caught: dict[str, int] = {}
    for config in filters:
        for rollout in rollouts:
            reason = group_reason(config, advantages_S) or rollout_reason(config, rollout)
            if reason is not None:
                caught[reason] = caught.get(reason, 0) + 1
                if config.mode == "enforce":
                    dropped.setdefault(rollout.id, reason)
    kept = tuple((r, float(a)) for r, a in zip(rollouts, advantages_S, strict=True) if r.id not in dropped)
    return Verdict(kept, dropped, caught)


def fruitless_after(before: int, group: Group, verdict: Verdict) -> int:
    """Groups in a row that gave nothing to train, once this one has closed.

    Equal rewards, and environments that fail or never return, count. A group that infrastructure or staleness kept from the batch is no
    evidence about the tasks: it changes nothing.
    """
    if verdict.trained:
        return 0
    small = not group.gradable or "small_group" in verdict.dropped.values()
    excused = any(rollout.outcome in (Outcome.infra_error, Outcome.stale) for rollout in group.rollouts)
    return before if small and excused else before + 1


def last_error(rollouts: Iterable[Rollout]) -> str:
    """Outcome and reason of the last rollout that failed; '' when none did."""
    failed = [f"{rollout.outcome.value}: {rollout.error}".removesuffix(": ") for rollout in rollouts if not rollout.outcome.gradable]
    return failed[-1] if failed else ""


def pass_rate(group: Group) -> float | None:
    """Mean reward of the gradable rollouts, held to 0..1: what the curriculum hears. None when there is none."""
    rewards = [rollout.reward for rollout in group.gradable if rollout.reward is not None]
    return float(np.clip(np.mean(rewards), 0.0, 1.0)) if rewards else None


def next_env(credits: Mapping[str, float], weights: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """(environment of the next group, credits after it): smooth weighted round robin, as in nginx's upstream module.

    Deterministic; over any stretch each environment has its share of the groups to within one.
    """
    raised = {env: credits.get(env, 0.0) + weight for env, weight in weights.items()}
    chosen = max(raised, key=raised.__getitem__)
    raised[chosen] -= sum(weights.values())
    return chosen, raised
