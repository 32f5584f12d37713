"""A trainer that dies and returns at its last checkpoint, and news of its versions that come late or twice."""

from __future__ import annotations

import asyncio
import random

from slipstream.errors import StateError
from slipstream.fakes.world import HEALTHY, Faults, Trace
from slipstream.types import Batch, PolicyVersion, StepReport


class FakeTrainer:
    """Trains batches in order, publishes a version for each, checkpoints every `checkpoint_every` steps. Outlives the orchestrator.

    `run` is its process. Everything else is the orchestrator's end (orchestrator.store.Outbox).
    """

    def __init__(
        self, rng: random.Random, faults: Faults = HEALTHY, trace: Trace | None = None, step_s: float = 2.0, checkpoint_every: int = 3
    ):
        self.batches: dict[int, Batch] = {}
        """Released, by step: what is on disk."""
        self.trained: list[int] = []
        """Steps, each once (work that is repeated after a death is not news)."""
        self.published = -1
        self.finished: str | None = None
        self._staged: dict[int, Batch] = {}
        self._rng = rng
        self._faults = faults
        self._trace = trace or Trace()
        self._step_s = step_s
        self._checkpoint_every = checkpoint_every
        self._checkpoint = 0
        self._news = asyncio.Event()

    # ---- the process ----

    async def run(self) -> None:
        """Train for ever; `die` interrupts."""
        self._publish(0)
        while True:
            step = max(self.trained, default=0) + 1
            while step not in self.batches:
                await self._news.wait()
            await self._train(step)

    async def die(self, seconds: float, process: asyncio.Task[None]) -> asyncio.Task[None]:
        """Kill `process`; after `seconds` a new one trains again from the last checkpoint. Returns that one."""
        process.cancel()
        self._trace("trainer dies")
        await asyncio.sleep(seconds)
        done = max(self.trained, default=0)
        self._trace(f"trainer returns at {self._checkpoint}")

        async def again() -> None:
            for step in range(self._checkpoint + 1, done + 1):
                await self._train(step)
            await self.run()

        return asyncio.get_running_loop().create_task(again())

    async def _train(self, step: int) -> None:
        await asyncio.sleep(self._step_s * self._rng.uniform(0.3, 2.0))
        if step not in self.trained:
            self.trained.append(step)
            self._trace(f"trained {step} {' '.join(self.batches[step].rollout_ids)}")
        if step % self._checkpoint_every == 0:
            self._checkpoint = step
        self._publish(step)

    def _publish(self, number: int) -> None:
        self.published = max(self.published, number)
        self._announce()

    # ---- the orchestrator's end ----

    async def send(self, batch: Batch) -> None:
        await self.stage(batch)
        await self.release(batch.step)

    async def stage(self, batch: Batch) -> None:
        if batch.step in self.batches:
            raise StateError(f"batch {batch.step} is sent twice")
        await self._trouble()
        self._staged[batch.step] = batch
        await self._trouble()

    async def release(self, step: int) -> None:
        await self._trouble()
        if step in self._staged:
            self.batches[step] = self._staged.pop(step)
            self._announce()
        elif step not in self.batches:
            raise StateError(f"batch {step} was neither staged nor sent")
        await self._trouble()

    def staged(self) -> list[int]:
        return sorted(self._staged)

    def discard(self, step: int) -> None:
        self._staged.pop(step, None)

    def updates(self, after: int) -> FakeUpdates:
        return FakeUpdates(self, after)

    def reports(self, after: int) -> FakeReports:
        return FakeReports(self, after)

    async def finish(self, reason: str) -> None:
        self.finished = reason
        self._trace(f"finish {reason}")

    async def news(self, after: int) -> PolicyVersion:
        """The newest version above `after`; sometimes late, sometimes an old one again."""
        if self.published >= 0 and self._rng.random() < self._faults.message_doubled:
            return fake_version(self._rng.randint(0, self.published))
        while self.published <= after:
            await self._news.wait()
        await asyncio.sleep(self._rng.uniform(0.0, self._faults.message_late_s))
        return fake_version(self.published)

    async def next_trained(self, after: int) -> int:
        while not any(step > after for step in self.trained):
            await self._news.wait()
        return min(step for step in self.trained if step > after)

    def _announce(self) -> None:
        """Wake everybody who waits for news. Each piece of news has an event of its own, so none is lost."""
        self._news.set()
        self._news = asyncio.Event()

    async def _trouble(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 0.02))
        if self._rng.random() < self._faults.send_fails:
            raise self._rng.choice((ConnectionError("lost"), TimeoutError("late"), OSError(28, "No space left on device")))


class FakeUpdates:
    def __init__(self, trainer: FakeTrainer, after: int):
        self._trainer = trainer
        self._after = after

    def __aiter__(self) -> FakeUpdates:
        return self

    async def __anext__(self) -> PolicyVersion:
        version = await self._trainer.news(self._after)
        self._after = max(self._after, version.number)
        return version


class FakeReports:
    def __init__(self, trainer: FakeTrainer, after: int):
        self._trainer = trainer
        self._after = after

    def __aiter__(self) -> FakeReports:
        return self

    async def __anext__(self) -> StepReport:
        self._after = await self._trainer.next_trained(self._after)
        return StepReport(self._after, {"trainer/loss/mean": 0.0})


def fake_version(number: int) -> PolicyVersion:
    return PolicyVersion(number, f"fingerprint-{number}", number - 1 if number else None, f"weights/v{number:06d}")
