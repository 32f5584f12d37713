"""Policy versions from the trainer to the engine: wait for one, make it live, try again until the engine says so.

A version is live once the engine reports its number and its fingerprint. While an engine is gone this keeps trying, and skips to the
newest version; training goes on meanwhile as far as the lag bound allows. Knows nothing of rollouts or evaluations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeVar

from slipstream.errors import EngineError, EngineUnavailable, ModelError, TrainerError, WireError
from slipstream.orchestrator.waits import Deadlines
from slipstream.ports import Engine, Trainer
from slipstream.types import PolicyVersion

T = TypeVar("T")
MOST_REFUSALS = 20
"""Times in a row that the engine may answer that it cannot use a version (wrong fingerprint, wrong shape) before the run ends."""


class Metrics(Protocol):
    """What the orchestrator needs of observe.metrics.MetricsWriter."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def event(self, name: str, **fields: Any) -> None: ...


class Publisher:
    """Engine and trainer of one run."""

    def __init__(self, engine: Engine, trainer: Trainer, metrics: Metrics, deadlines: Deadlines, silence_s: float):
        """`silence_s`: how long the trainer may owe a version."""
        self.waited_s = 0.0
        """Seconds spent waiting for the trainer; the reader sets it back."""
        self._engine = engine
        self._trainer = trainer
        self._metrics = metrics
        self._deadlines = deadlines
        self._silence_s = silence_s
        self._silent_s = 0.0
        self._refusals = 0

    async def next_version(self, after: int, owed: bool) -> PolicyVersion | None:
        """The newest version above `after`, or None after a while without.

        `owed`: the trainer has work, or has not said anything yet. Raises TrainerError when it owes a version for too long.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        version = await self._poll(after, self._deadlines.poll_s)
        seconds = loop.time() - started
        self.waited_s += seconds
        self._silent_s = self._silent_s + seconds if owed and version is None else 0.0
        if self._silent_s > self._silence_s:
            raise TrainerError(
                f"no policy version after {after} within trainer.batch_timeout_s = {self._silence_s:g} s: is the trainer alive? See its log"
            )
        return version

    async def make_live(self, version: PolicyVersion) -> PolicyVersion:
        """Prepare and commit until the engine samples from `version`, or from a newer one that came meanwhile. Returns which.

        Raises EngineError when the engine refuses versions again and again, rather than being unavailable.
        """
        loop, delay_s = asyncio.get_running_loop(), 0.1
        started = loop.time()
        while (problem := await self._swap_in(version)) is not None:
            self._metrics.event("publish_failed", version=version.number, error=problem)
            version = await self._poll(version.number, delay_s) or version
            delay_s = min(2 * delay_s, 5.0)
        self._metrics.event("published", version=version.number, seconds=loop.time() - started)
        return version

    async def _poll(self, after: int, timeout_s: float) -> PolicyVersion | None:
        try:
            async with asyncio.timeout(timeout_s):
                async for version in self._trainer.updates(after):
                    if version.number > after:
                        return version
        except TimeoutError:
            pass
        except (ModelError, WireError) as error:  # replaced while it was read: a newer one follows, or the same again
            self._metrics.event("publish_failed", version=after + 1, error=str(error))
            await asyncio.sleep(timeout_s)
        return None

    async def _swap_in(self, version: PolicyVersion) -> str | None:
        """None once the engine samples from `version`; otherwise what went wrong."""
        deadlines = self._deadlines
        try:
            await _within(deadlines.prepare_s, "prepare", self._engine.prepare(version))
            await _within(deadlines.commit_s, "commit", self._engine.commit(version.number))
            state = await _within(deadlines.state_s, "state", self._engine.state())
        except EngineError as error:
            self._count_refusal(error)
            return f"{type(error).__name__}: {error}"
        self._refusals = 0
        if (state.live_version, state.fingerprint) == (version.number, version.fingerprint):
            return None
        return f"live is version {state.live_version} with fingerprint {state.fingerprint}, not {version.fingerprint}"

    def _count_refusal(self, error: EngineError) -> None:
        """Waiting mends an engine that is away or slow; it does not mend one that says no."""
        self._refusals = 0 if isinstance(error, EngineUnavailable) else self._refusals + 1
        if self._refusals >= MOST_REFUSALS:
            raise error


async def _within(seconds: float, what: str, call: Awaitable[T]) -> T:
    """Raises EngineUnavailable at the deadline."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise EngineUnavailable(f"{what}: no answer of the engines within {seconds:g} s; it is tried again") from None
