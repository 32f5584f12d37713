"""How many rollouts run at once, and whether one more group may start now: pure functions.

Growth is additive and reduction multiplicative (AIMD; Chiu and Jain 1989), driven by what the engine says about its KV cache and queue.
Knows nothing of tasks or versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slipstream.config.run import ConcurrencyConfig
from slipstream.types import EngineState

GROW = 4
SHRINK = 0.75


class Hold(StrEnum):
    """Why no group starts now."""

    version = "version"
    """Enough is issued for the live version: a newer one, or a dropped rollout, makes room."""
    slots = "slots"
    """The concurrency limit is reached."""
    rate = "rate"
    """tasks_per_minute."""
    infra = "infra"
    """Rollouts fail for reasons of infrastructure: wait before the next try."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What decides whether a group may start. Times are seconds of the event loop's clock."""

    room: float
    """Samples or tokens that may still be issued; see staleness.room."""
    in_flight: int
    group_size: int
    limit: int
    now: float
    rate_opens_at: float
    infra_opens_at: float


def hold(gate: Gate) -> tuple[Hold, float | None] | None:
    """None: start a group. Otherwise why not, and the seconds after which the answer changes by itself (None: only by an event).

    A group may overrun `room` (by less than a group), or batches that are no multiple of it would never fill; and it may start alone
    above `limit`, or a limit below the group size would stop the run.
    """
    if gate.room <= 0:
        return Hold.version, None
    if gate.in_flight and gate.in_flight + gate.group_size > gate.limit:
        return Hold.slots, None
    if gate.now < gate.infra_opens_at:
        return Hold.infra, gate.infra_opens_at - gate.now
    if gate.now < gate.rate_opens_at:
        return Hold.rate, gate.rate_opens_at - gate.now
    return None


def next_limit(limit: int, in_flight: int, group_size: int, state: EngineState, config: ConcurrencyConfig) -> int:
    """The limit after one look at the engine: cut while its KV cache is tight, grown while the limit is what holds groups back.

    A queue in the engine is no reason to cut: a new group waits there for a step or two, and where the engine is busy without being
    short of KV, rollouts wait as well inside as outside. A queue longer than what runs is a reason not to grow.
    """
    if not config.adaptive:
        return limit
    if state.kv_used_frac > config.kv_high_frac:
        return max(config.min, int(limit * SHRINK))
    if in_flight + group_size > limit and state.waiting <= state.running:
        return min(config.max, limit + GROW)
    return limit


def infra_delay(streak: int) -> float:
    """Seconds to wait after `streak` infrastructure failures without a success between them: 0.05 s doubling up to 2 s."""
    return 0.0 if streak == 0 else min(2.0, 0.05 * 2.0 ** min(streak - 1, 10))
