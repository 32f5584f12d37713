"""What can go wrong, how often, and a trace of what happened: shared by all fakes of a simulation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

FOREVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances per call, and lengths in seconds. All 0: a healthy world with varying latencies."""

    env_slow: float = 0.0
    """An environment takes 20 times as long."""
    env_hang: float = 0.0
    """An environment never returns."""
    env_raise: float = 0.0
    env_swallow: float = 0.0
    """A player ignores its cancellation and goes on for a long while."""
    engine_lost: float = 0.0
    """A reply of the engine never arrives (what was asked for may have happened or not)."""
    engine_fails: float = 0.0
    """A call fails with EngineUnavailable."""
    engine_deaths: int = 0
    """Times that the engine dies in the middle of everything; it returns after `engine_dead_s`."""
    engine_dead_s: float = 20.0
    message_late_s: float = 0.0
    """Most by which news of a version is late."""
    message_doubled: float = 0.0
    """News of a version comes again, or of an older one."""
    send_fails: float = 0.0
    """Handing over a batch fails, before or after it became durable."""
    trainer_deaths: int = 0
    """Times that the trainer dies; it returns after `trainer_dead_s`, at its last checkpoint."""
    trainer_dead_s: float = 10.0
    store_slow_s: float = 0.0
    """Most that writing rollouts takes."""
    horizon_s: float = 100.0
    """Deaths happen before this time."""


HEALTHY = Faults()


class Trace:
    """What happened, in order: equal seeds must give equal traces."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, what: str) -> None:
        self.lines.append(f"{asyncio.get_running_loop().time():.6f} {what}")
