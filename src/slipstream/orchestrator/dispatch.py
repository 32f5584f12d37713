"""Rollouts in flight: started, watched by a deadline, cancelled, abandoned. Whatever a player does, each one ends, once, in time.

    Flight.ended resolves with the player's rollout, or
        deadline or the group's grace passed   -> Outcome.cut
        too old to be trained                  -> Outcome.stale
        the player raised                      -> the outcome of the error's class
    A player that swallows cancellation is abandoned `grace_s` later: its slot is free, and what it returns later is only counted.

Knows no rewards, groups or batches; versions only to find what is too old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from slipstream.errors import EngineError, EnvError, RewardError
from slipstream.orchestrator.concurrency import infra_delay
from slipstream.orchestrator.ledger import Ledger
from slipstream.ports import Env, Player
from slipstream.types import Outcome, Rollout, Task

CANCEL_GRACE_S = 5.0
"""How long a player may take to react to cancellation."""


class Flight:
    """One rollout in flight. `ended` never raises and is resolved at most `timeout_s` + `grace_s` after the start."""

    def __init__(self, play: Coroutine[Any, Any, Rollout], blank: Rollout, timeout_s: float, grace_s: float = CANCEL_GRACE_S):
        """`blank`: the rollout as it would look if nothing came back."""
        loop = asyncio.get_running_loop()
        self.blank = blank
        self.ended: asyncio.Future[Rollout] = loop.create_future()
        self.abandoned = False
        self.attempt = 0
        self._grace_s = grace_s
        self._verdict: Outcome | None = None
        self._task = loop.create_task(play, name=blank.id)
        self._task.add_done_callback(self._finished)
        self._timer = loop.call_later(timeout_s, self.cancel, Outcome.cut)

    def cancel(self, verdict: Outcome) -> None:
        """End it with this outcome. The first verdict stands."""
        if self._verdict is None and not self.ended.done():
            self._verdict = verdict
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._abandon)
            self._task.cancel()

    def _finished(self, task: asyncio.Task[Rollout]) -> None:
        self._timer.cancel()
        rollout = _result(task, self.blank, self._verdict)
        if not self.ended.done():
            self.ended.set_result(rollout)

    def _abandon(self) -> None:
        self.abandoned = True
        if not self.ended.done():
            self.ended.set_result(_without_reward(self.blank, self._verdict or Outcome.cut))

    def when_over(self, call: Callable[[], None]) -> None:
        """Call once the player itself has returned, however late."""
        self._task.add_done_callback(lambda task: call())


class Dispatcher:
    """All rollouts in flight of a run, by id in the order of issue, and the books about them."""

    def __init__(self, ledger: Ledger, wall: Callable[[], float], grace_s: float = CANCEL_GRACE_S):
        """`wall`: seconds since the epoch."""
        self.flights: dict[str, Flight] = {}
        self.abandoned = 0
        """Players so far that did not end when they were cancelled."""
        self.late = 0
        """Those that returned in the end; their results were ignored."""
        self.infra_streak = 0
        self.infra_opens_at = 0.0
        """Loop time before which nothing new should start, because rollouts fail for reasons of infrastructure."""
        self._ledger = ledger
        self._wall = wall
        self._grace_s = grace_s

    def issue(self, player: Player, task: Task, rollout_id: str, group_id: str, version: int, timeout_s: float, attempt: int = 0) -> Flight:
        """Start one rollout at live version `version`. Attempts after the first start once the infrastructure had time to recover."""
        blank = Rollout(rollout_id, task, group_id, Outcome.cut, version_start=version, started_s=self._wall())
        delay = max(0.0, self.infra_opens_at - asyncio.get_running_loop().time()) if attempt else 0.0
        flight = Flight(_play(player, blank, delay), blank, delay + timeout_s, self._grace_s)
        flight.attempt = attempt
        self._ledger.issue(rollout_id, group_id, task.env, task.id, blank.started_s, version)
        self.flights[rollout_id] = flight
        flight.ended.add_done_callback(lambda ended: self._landed(flight, ended.result()))
        return flight

    def cancel_stale(self, oldest: int) -> None:
        """Cancel what was issued before version `oldest`: none of its first tokens can be trained any more."""
        for flight in list(self.flights.values()):
            if flight.blank.version_start < oldest:
                flight.cancel(Outcome.stale)

    async def stop(self) -> None:
        """Cancel everything and wait until it has ended; at most the grace."""
        flights = list(self.flights.values())
        for flight in flights:
            flight.cancel(Outcome.cut)
        if flights:
            await asyncio.wait([flight.ended for flight in flights])

    def _landed(self, flight: Flight, rollout: Rollout) -> None:
        del self.flights[flight.blank.id]
        if flight.abandoned:
            self.abandoned += 1
            flight.when_over(self._count_late)
        if rollout.outcome is Outcome.infra_error:
            self.infra_streak += 1
            self.infra_opens_at = asyncio.get_running_loop().time() + infra_delay(self.infra_streak)
        elif rollout.outcome.gradable:
            self.infra_streak, self.infra_opens_at = 0, 0.0

    def _count_late(self) -> None:
        self.late += 1


async def _play(player: Player, blank: Rollout, delay: float) -> Rollout:
    if delay:
        await asyncio.sleep(delay)
    return await player(blank.task, blank.id, blank.group_id, blank.version_start)


def _result(task: asyncio.Task[Rollout], blank: Rollout, verdict: Outcome | None) -> Rollout:
    """What a finished player task means. A verdict outweighs what came back after it, but the turns are kept for people."""
    if task.cancelled():
        return _without_reward(blank, verdict or Outcome.infra_error, "" if verdict else "the player was cancelled from inside")
    error = task.exception()
    if verdict is not None:
        kept = None if error else task.result()
        return _without_reward(kept if isinstance(kept, Rollout) and kept.id == blank.id else blank, verdict)
    if error is not None:
        return _without_reward(blank, outcome_of(error), f"{type(error).__name__}: {' '.join(str(error).split())}")
    rollout = task.result()
    if not isinstance(rollout, Rollout) or rollout.id != blank.id:
        return _without_reward(blank, Outcome.env_error, f"the player returned {str(rollout)[:80]} instead of rollout {blank.id}")
    return rollout


def draw(env: Env, split: str, index: int) -> Task:
    """A task of an environment. Raises EnvError where the environment raises anything: without tasks there is no run."""
    try:
        return env.task(split, index)
    except Exception as error:
        raise EnvError(f"environment {env.name!r}: task({split!r}, {index}) raised {type(error).__name__}: {error}") from error


def outcome_of(error: BaseException) -> Outcome:
    """A player should return a rollout whatever happens; one that raises instead has its error sorted by class."""
    if isinstance(error, EngineError):
        return Outcome.infra_error
    if isinstance(error, RewardError):
        return Outcome.reward_error
    return Outcome.env_error


def _without_reward(rollout: Rollout, outcome: Outcome, error: str = "") -> Rollout:
    return replace(rollout, outcome=outcome, reward=None, error=error)
