"""Fakes of the ports, for simulations and tests: no model, no files, no real time.

Each runs on asyncio's time and draws what happens from a seeded `random.Random`, so that a schedule is a function of its seed under a
virtual clock (tests/sim). `Faults` says how often what goes wrong, at any await. Each fake keeps what it was told, for the test to
examine: they play the world around the orchestrator, and know nothing of its inside.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.errors import EngineUnavailable, EnvError, StateError
from slipstream.ports import Engine, Policy
from slipstream.types import (
    Batch,
    Completion,
    EngineState,
    GenerateRequest,
    Outcome,
    PolicyVersion,
    Rollout,
    Sampling,
    StepReport,
    Task,
    Turn,
    Versions,
)

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


class FakeEngine:
    """Samples random tokens at a constant pace; stamps each with the version that is live at that moment.

    Stands for a pool of replicas: after a death it returns with the version that was committed last, as serving.pool sees to.
    """

    def __init__(self, rng: random.Random, faults: Faults = HEALTHY, trace: Trace | None = None, token_s: float = 0.05):
        self.live: PolicyVersion | None = None
        self.prepared: PolicyVersion | None = None
        self.running = 0
        self.commits: list[int] = []
        self.is_up = asyncio.Event()
        self.is_up.set()
        self._rng = rng
        self._faults = faults
        self._trace = trace or Trace()
        self._token_s = token_s
        self._deaths = 0
        self._ids: set[str] = set()
        self._aborted: set[str] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """At most 12 tokens. Weights may change in the middle."""
        await self._call("generate")
        if self.live is None:
            raise EngineUnavailable("no weights yet")
        count = self._rng.randint(1, min(12, request.sampling.max_tokens))
        versions: list[tuple[int, int]] = []
        deaths = self._deaths
        self.running += 1
        self._ids.add(request.id)
        try:
            for chunk in _chunks(count, 6):
                await asyncio.sleep(chunk * self._token_s * self._rng.uniform(0.5, 2.0))
                if self._deaths != deaths or not self.is_up.is_set():
                    raise EngineUnavailable("the engine died")
                if request.id in self._aborted:
                    break
                versions.append((self.live.number, chunk))
            reason = "abort" if request.id in self._aborted else "stop"
        finally:
            self.running -= 1
            self._ids.discard(request.id)
            self._aborted.discard(request.id)
        tokens_N = np.array([self._rng.randrange(100) for _ in range(sum(n for _, n in versions))], np.int32)
        return Completion(request.id, tokens_N, np.full(len(tokens_N), -1.0, np.float32), _merge(versions), reason)

    async def prepare(self, version: PolicyVersion) -> None:
        await self._call("prepare")
        await asyncio.sleep(self._rng.uniform(0.05, 0.5))
        self.prepared = version
        await self._reply()

    async def commit(self, number: int) -> None:
        await self._call("commit")
        if self.live is None or self.live.number != number:
            if self.prepared is None or self.prepared.number != number:
                raise EngineUnavailable(f"version {number} is not prepared")
            self.live = self.prepared
            self.commits.append(number)
            self._trace(f"live {number}")
        await self._reply()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort")
        self._aborted |= self._ids & set(request_ids)

    async def state(self) -> EngineState:
        await self._call("state")
        await self._reply()
        number, fingerprint = (self.live.number, self.live.fingerprint) if self.live else (-1, "")
        return EngineState(number, fingerprint, running=self.running, kv_used_frac=min(1.0, self.running / 64))

    async def die(self, seconds: float) -> None:
        """Everything running fails, nothing answers for `seconds`, then the last committed version is live again."""
        self._trace("engine dies")
        self._deaths += 1
        self.is_up.clear()
        self.prepared = None
        await asyncio.sleep(seconds)
        self.is_up.set()
        self._trace("engine returns")

    async def _call(self, what: str) -> None:
        """The way to the engine."""
        if not self.is_up.is_set():
            raise EngineUnavailable(f"{what}: nobody answers")
        if self._rng.random() < self._faults.engine_fails:
            raise EngineUnavailable(f"{what}: connection reset")
        if self._rng.random() < self._faults.engine_lost:
            await asyncio.sleep(FOREVER_S)

    async def _reply(self) -> None:
        """The way back."""
        if self._rng.random() < self._faults.engine_lost:
            await asyncio.sleep(FOREVER_S)


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


def fake_version(number: int) -> PolicyVersion:
    return PolicyVersion(number, f"fingerprint-{number}", number - 1 if number else None, f"weights/v{number:06d}")


def _chunks(count: int, size: int) -> list[int]:
    return [min(size, count - start) for start in range(0, count, size)]


def _merge(versions: Sequence[tuple[int, int]]) -> Versions:
    """Run-length segments with equal neighbours joined."""
    merged: list[tuple[int, int]] = []
    for version, count in versions:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        else:
            merged.append((version, count))
    return tuple(merged)
