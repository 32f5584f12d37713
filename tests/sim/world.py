"""One seeded schedule: an orchestrator among fakes, faults at any await, crashes between any two, and the laws that must hold after it."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import RunConfig
from slipstream.fakes.engine import FakeEngine
from slipstream.fakes.envs import FakeEnv, FakePlayer
from slipstream.fakes.store import FakeMetrics, FakeStore
from slipstream.fakes.trainer import FakeTrainer
from slipstream.fakes.world import FOREVER_S, Faults, Trace
from slipstream.orchestrator.curriculum import Curriculum
from slipstream.orchestrator.evals import is_pinned
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.loop import BoundEnv, Orchestrator, Parts
from slipstream.orchestrator.waits import Deadlines
from slipstream.types import Rollout, Task
from tests.sim import clock

DEADLINES = Deadlines(
    prepare_s=5.0, commit_s=5.0, state_s=2.0, send_s=2.0, poll_s=3.0, idle_s=30.0, watch_s=5.0, eval_s=60.0, cancel_grace_s=2.0
)


@dataclass(frozen=True)
class Plan:
    """Everything that a seed decides."""

    seed: int
    config: RunConfig
    faults: Faults
    crashes: tuple[tuple[str, int], ...] = ()
    """(port, moments): when each life of the orchestrator but the last ends, in moments before and after calls of that port."""
    limit_s: float = 1000.0
    """Virtual seconds within which the run must be complete, whatever goes wrong."""


def plan(seed: int, **overrides: Any) -> Plan:
    """A schedule drawn from the seed."""
    rng = random.Random(seed)
    group_size = rng.choice((2, 4))
    batch = rng.choice(({"type": "samples", "samples": 8}, {"type": "samples", "samples": 6}, {"type": "tokens", "tokens": 90}))
    envs = [
        {"id": f"fake-{i}", "group_size": group_size, "rollout_timeout_s": 20.0, "weight": i + 1.0} for i in range(rng.choice((1, 1, 2)))
    ]
    orchestrator = {
        "batch": batch,
        "max_off_policy_steps": rng.choice((0, 1, 2, 3)),
        "stale": rng.choice(("drop", "drop", "mask")),
        "group_quorum": rng.choice((1.0, 0.5)),
        "group_grace_s": rng.choice((0.0, 2.0)),
        "infra_retries": rng.choice((0, 1, 2)),
        "concurrency": {"initial": rng.choice((8, 16, 64)), "min": 2, "max": 64},
        "curriculum": {"type": rng.choice(("uniform", "pass_rate"))},
    }
    evals = {"interval": rng.choice((0, 2)), "tasks": rng.choice((0, 3)), "samples": rng.choice((1, 2)), "skip_first": rng.random() < 0.5}
    values = {
        "seed": seed,
        "max_steps": 4,
        "model": {"path": "none", "seq_len": 256},
        "envs": envs,
        "orchestrator": orchestrator,
        "eval": evals,
    }
    faults = draw_faults(rng)
    crashes = tuple(
        rng.choice((("engine", rng.randint(5, 400)), ("outbox", rng.randint(1, 16)))) for _ in range(rng.choice((0, 0, 1, 1, 2)))
    )
    return replace(Plan(seed, RunConfig.model_validate(values), faults, crashes), **overrides)


def draw_faults(rng: random.Random) -> Faults:
    """Each kind of fault in about a third of the schedules."""

    def maybe(value: float) -> float:
        return value if rng.random() < 0.35 else 0.0

    return Faults(
        env_slow=maybe(0.1),
        env_hang=maybe(0.05),
        env_raise=maybe(0.05),
        env_swallow=maybe(0.3),
        engine_lost=maybe(0.02),
        engine_fails=maybe(0.05),
        engine_deaths=int(maybe(1) and rng.randint(1, 2)),
        message_late_s=maybe(5.0),
        message_doubled=maybe(0.3),
        send_fails=maybe(0.15),
        trainer_deaths=int(maybe(1) and rng.randint(1, 2)),
        store_slow_s=maybe(1.0),
        horizon_s=40.0,
    )


class Wire:
    """The orchestrator's side of a port. The process can be killed before and after any call; then nothing gets through any more."""

    def __init__(self, name: str, target: Any, world: World):
        self._name = name
        self._target = target
        self._world = world

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        wired = self._wired(method) if inspect.iscoroutinefunction(method) else method
        setattr(self, name, wired)
        return wired

    def _wired(self, method: Any) -> Any:

        async def call(*args: Any) -> Any:
            await self._world.moment(self._name)
            result = await method(*args)
            await self._world.moment(self._name)
            return result

        return call


@dataclass
class World:
    """What outlives the orchestrator."""

    plan: Plan
    path: Path
    trace: Trace = field(default_factory=Trace)
    crash: tuple[str, int] | None = None
    """Port and moments left until the orchestrator dies."""
    starts: int = 0
    reason: str | None = None
    orchestrators: list[Orchestrator] = field(default_factory=list)
    playing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        rng, faults = random.Random(self.plan.seed + 1), self.plan.faults
        self.rng = rng
        self.engine = FakeEngine(rng, faults, self.trace)
        self.trainer = FakeTrainer(rng, faults, self.trace)
        self.store = FakeStore(rng, faults)
        self.metrics = FakeMetrics()
        self.killed = asyncio.Event()

    async def moment(self, port: str) -> None:
        """One of the moments at which the orchestrator may die. After its death nothing gets through any more."""
        if self.crash is not None and self.crash[0] == port:
            self.crash = (port, self.crash[1] - 1)
            if self.crash[1] <= 0:
                self.killed.set()
        if self.killed.is_set():
            await asyncio.sleep(FOREVER_S)

    async def run(self) -> None:
        """Start the orchestrator, kill and restart it as planned, until it ends by itself. Raises TimeoutError when it does not."""
        around = [asyncio.create_task(self._around())]
        crashes = list(self.plan.crashes)
        async with asyncio.timeout(self.plan.limit_s):
            while self.reason is None:
                self.crash = crashes.pop(0) if crashes else None
                await self._life()
        around[0].cancel()
        self.check()

    async def _life(self) -> None:
        """One orchestrator process."""
        self.killed = asyncio.Event()
        self.starts += 1
        ledger = Ledger(self.path, synchronous="OFF")
        spared = asyncio.all_tasks()
        orchestrator = self._orchestrator(ledger)
        self.orchestrators.append(orchestrator)
        process, killed = asyncio.create_task(orchestrator.run()), asyncio.create_task(self.killed.wait())
        await asyncio.wait({process, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if process.done():
            self.reason = process.result()
            ledger.audit()
            ledger.close()
        else:
            self.trace("orchestrator killed")
            ledger._db.close()  # what was not flushed is lost
            await clock.kill(spared | around_tasks())

    def _orchestrator(self, ledger: Ledger) -> Orchestrator:
        config, loop = self.plan.config, asyncio.get_running_loop()
        engine, state = Wire("engine", self.engine, self), ledger.last_state()
        envs = []
        for env in config.envs:
            player = FakePlayer(engine, self.rng, self.plan.faults, self.trace)
            tasks = 40
            curriculum = Curriculum(config.orchestrator.curriculum, tasks, config.seed)
            if state:
                curriculum = Curriculum.from_state(config.orchestrator.curriculum, tasks, config.seed, state["curricula"][env.label])
            envs.append(BoundEnv(env, FakeEnv(env.label, tasks), self._watched(player), player, curriculum))
        parts = Parts(
            tuple(envs),
            engine,
            Wire("outbox", self.trainer, self),
            ledger,
            Wire("store", self.store, self),
            self.metrics,
            loop.time,
            DEADLINES,
        )
        return Orchestrator(config, parts)

    def _watched(self, player: FakePlayer) -> Any:
        async def play(task: Task, rollout_id: str, group_id: str, version_start: int) -> Rollout:
            self.trace(f"start {rollout_id} v{version_start}")
            oldest = self.orchestrators[-1].step - 1 - self.plan.config.orchestrator.max_off_policy_steps
            assert version_start >= oldest, f"{rollout_id} was issued at version {version_start}, too old for every batch to come"
            assert rollout_id not in self.playing, f"{rollout_id} is played twice"
            self.playing.add(rollout_id)
            return await player(task, rollout_id, group_id, version_start)

        return play

    async def _around(self) -> None:
        """Trainer process, and deaths of trainer and engine at random moments."""
        faults = self.plan.faults
        process = asyncio.create_task(self.trainer.run(), name="world-trainer")
        times = [(self.rng.uniform(0, faults.horizon_s), "engine") for _ in range(faults.engine_deaths)]
        times += [(self.rng.uniform(0, faults.horizon_s), "trainer") for _ in range(faults.trainer_deaths)]
        loop = asyncio.get_running_loop()
        for when, who in sorted(times):
            await asyncio.sleep(max(0.0, when - loop.time()))
            if who == "engine":
                await self.engine.die(faults.engine_dead_s)
            else:
                process = await self.trainer.die(faults.trainer_dead_s, process)
                process.set_name("world-trainer")

    # ---- the laws ----

    def check(self) -> None:
        """After the run: it is complete, nothing is too old, the books balance, nothing was trained twice, every batch has its size."""
        config, batches = self.plan.config, self.trainer.batches
        assert self.reason == "max_steps" == self.trainer.finished, f"ended with {self.reason}, told the trainer {self.trainer.finished}"
        assert sorted(batches) == list(range(1, config.max_steps + 1)) == self.trainer.trained
        assert self.trainer.published == config.max_steps == self.engine.live.number
        assert sum(o.missed_wakes for o in self.orchestrators) == 0, "a wake-up is missing"
        assert not any(o.dispatcher.flights for o in self.orchestrators[-1:]), "a slot was never given back"
        for step, batch in batches.items():
            self._check_batch(step, batch)
        trained = [id for batch in batches.values() for id in dict.fromkeys(batch.rollout_ids)]
        assert len(set(trained)) == len(trained), "a rollout was trained twice"
        self._check_ledger(set(trained))
        self._check_evals()
        stored = {id for ids in self.store.rollouts.values() for id in ids}
        assert set(trained) <= stored, "a trained rollout was not written to the store"

    def _check_batch(self, step: int, batch: Any) -> None:
        settings = self.plan.config.orchestrator
        for row in batch.micro_batches:
            lags = step - 1 - row.versions_T[row.loss_mask_T]
            assert lags.min() >= 0, f"batch {step} was sampled from the future"
            assert lags.max() <= settings.max_off_policy_steps, f"batch {step} has tokens with lag {lags.max()}"
        sizes = np.bincount(np.concatenate([row.sample_T for row in batch.micro_batches]))
        unit = np.ones(len(sizes)) if settings.batch.type == "samples" else sizes
        wanted = settings.batch.samples if settings.batch.type == "samples" else settings.batch.tokens
        last = np.array([id == batch.rollout_ids[-1] for id in batch.rollout_ids])
        assert unit.sum() >= wanted > unit[~last].sum(), f"batch {step} has size {unit.sum()}, not {wanted}"

    def _check_ledger(self, trained: set[str]) -> None:
        ledger = Ledger(self.path, synchronous="OFF")
        ledger.audit()
        assert ledger.issued == ledger.trained + sum(ledger.dropped.values()), "something is still in flight or ready"
        rows = dict(ledger._db.execute("SELECT rollout_id, step FROM trained"))
        assert set(rows) == trained, "the ledger and the batches disagree"
        assert all(id in self.trainer.batches[step].rollout_ids for id, step in rows.items())
        issued = {id for (id,) in ledger._db.execute("SELECT id FROM rollouts")}
        assert self.playing <= issued, "a rollout was played that the ledger does not know"
        assert ledger.unsent() == []
        ledger.close()

    def _check_evals(self) -> None:
        settings, steps = self.plan.config.eval, self.plan.config.max_steps
        for version, rollouts in self.store.evals.items():
            assert all(is_pinned(rollout, version) for rollout in rollouts if rollout.reward is not None)
        abandoned = any(name == "eval_abandoned" for name, _ in self.metrics.events)
        assert settings.tasks == 0 or abandoned or steps in self.store.evals, "the last version was not evaluated"

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace.lines).encode()).hexdigest()


def around_tasks() -> set[asyncio.Task]:
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("world-")}


def simulate(plan: Plan, path: Path) -> World:
    """Run one schedule to its end and check the laws. `path`: where its ledger goes."""

    async def main() -> World:
        world = World(plan, path)
        await world.run()
        return world

    return clock.run(main())
