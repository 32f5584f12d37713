"""A run, on one screen: `collect` (Task -> Group), `learn` (Group -> Batch), `publish` (PolicyVersion -> live weights).

    collect ──groups──> ready ──> learn ──batches──> trainer ──versions──> publish ──live──> collect

Nothing waits for anything but what it consumes. Synchronous training is the same loop with `max_off_policy_steps = 0`. This module only
composes: anything with an `if` about tokens, rewards, versions or rows is a pure function beside it (staleness, groups, concurrency,
evals, step_metrics). It uses asyncio's time alone, so that a virtual clock can drive it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.config.envs import EnvConfig
from slipstream.config.run import RunConfig
from slipstream.errors import EngineError
from slipstream.observe.metrics import counted
from slipstream.orchestrator.concurrency import Gate, Hold, hold, next_limit
from slipstream.orchestrator.curriculum import Curriculum
from slipstream.orchestrator.dispatch import Dispatcher, Flight, draw
from slipstream.orchestrator.evals import Evaluator, is_due
from slipstream.orchestrator.groups import Open, fruitless_after, judge, last_error, next_env, pass_rate, play_group
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.pack import make_batch, routing_bytes
from slipstream.orchestrator.publish import Metrics, Publisher
from slipstream.orchestrator.queue import ReadyQueue
from slipstream.orchestrator.staleness import Ready, batch_hash, check_lag, oldest_version, room
from slipstream.orchestrator.step_metrics import batch_metrics, reward_metrics
from slipstream.orchestrator.store import Outbox, Store
from slipstream.orchestrator.waits import Deadlines, Wake, persist
from slipstream.ports import Engine, Env, Player
from slipstream.transport.threads import off_loop
from slipstream.types import Rollout, Task


@dataclass(frozen=True, slots=True)
class BoundEnv:
    """One environment of the run, and how it is practised and evaluated."""

    config: EnvConfig
    env: Env
    player: Player
    eval_player: Player
    curriculum: Curriculum


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything outside the loop that it talks to."""

    envs: tuple[BoundEnv, ...]
    engine: Engine
    trainer: Outbox
    ledger: Ledger
    store: Store
    metrics: Metrics
    wall: Callable[[], float]
    """Seconds since the epoch."""
    deadlines: Deadlines = field(default_factory=Deadlines)


class Orchestrator:
    """One run from its first task, or from where the ledger says it ended, to its last evaluation."""

    def __init__(self, config: RunConfig, parts: Parts):
        deadlines, eval_envs = parts.deadlines, [(bound.config, bound.env, bound.eval_player) for bound in parts.envs]
        self.config, self.settings, self.parts = config, config.orchestrator, parts
        self.envs = {bound.config.label: bound for bound in parts.envs}
        self.live: int | None = None
        """Version that the engine samples from, once it is known."""
        self.step = 1
        """The next batch to be cut."""
        self.open: dict[str, Open] = {}
        """Groups being played."""
        self.reason: str | None = None
        """Why the run ends; None while it goes on."""
        self.limit = self.settings.concurrency.initial
        self.queue = ReadyQueue(self.settings, parts.ledger, config.model.seq_len)
        self.dispatcher = Dispatcher(parts.ledger, parts.wall, deadlines.cancel_grace_s)
        self.publisher = Publisher(parts.engine, parts.trainer, parts.metrics, deadlines, config.trainer.batch_timeout_s)
        self.evaluator = Evaluator(eval_envs, config.eval, lambda: self.limit, parts.wall, deadlines.cancel_grace_s)
        self.waited: defaultdict[str, float] = defaultdict(float)
        """Seconds that each loop waited since the last step, by what it waited for."""
        self.missed_wakes = 0
        """Waits that ended by their deadline although what they waited for was there: always 0, or a wake-up is missing."""
        self._can_collect, self._can_learn = Wake(), Wake()
        self._groups = self._fruitless = 0
        self._credits: dict[str, float] = {}
        self._rate_opens_at = self._loop_lag_s = self._began = 0.0

    # ---- the run ----

    async def run(self) -> str:
        """Returns the reason for the end: 'max_steps', 'stop_at_eval', 'max_minutes' or 'fruitless: ...'. Tells the trainer on every way
        out."""
        reason, self._began = "stopped", asyncio.get_running_loop().time()
        try:
            await self._restore()
            await self._work()
            reason = self.reason or reason
        except BaseExceptionGroup as group:
            error = _first(group)
            reason = f"error: {type(error).__name__}: {error}"
            raise error from group
        except Exception as error:
            reason = f"error: {type(error).__name__}: {error}"
            raise
        finally:
            await self._end(reason)
        return reason

    async def collect(self) -> None:
        """Task -> Group.

        Consumes tasks: environments by weight, tasks by curriculum. Waits for: room under the lag bound, free slots, the rate limit.
        Woken by: learn (a batch was cut, rollouts were dropped), publish (a version is live), rollouts and groups that end.
        """
        while self.reason is None:
            held = hold(self._gate())
            if held is None:
                self._open_group()
                await asyncio.sleep(0)  # its requests leave before the next group is opened
            else:
                await self._wait(self._can_collect, *held, missed=lambda: hold(self._gate()) is None)
        await self.dispatcher.stop()

    async def learn(self) -> None:
        """Group -> Batch.

        Consumes ready rollouts, the oldest version first. Waits for: enough of them for a batch, then for the trainer to hold it
        durably. Woken by: groups that close. How far it runs ahead of the trainer is bounded by the lag bound, through `collect`.
        """
        while self.step <= self.config.max_steps and (taken := await self._next_batch()):
            await self._ship(self.step - 1, taken)
            if self._out_of_time():
                self.stop("max_minutes")
        self.stop("max_steps")

    async def publish(self) -> None:
        """PolicyVersion -> live weights.

        Consumes the trainer's versions. Waits for: a new one, the engine to load and swap it in, an evaluation that is due at it.
        Woken by: the trainer. Ends when the version made by the last batch is live.
        """
        while self.reason is None or self.live != self.step - 1:
            after = -1 if self.live is None else self.live
            version = await self.publisher.next_version(after, owed=self.live is None or self.step - 1 > self.live)
            if version is not None:
                self.live = (await self.publisher.make_live(version)).number
                self._can_collect.set()
                await self.parts.store.retire_weights(self.live - 1)
                await self._evaluate()
        await self._evaluate(final=True)

    async def watch(self) -> None:
        """Adapts the concurrency limit to the engine, and measures how late the event loop is. Waits for: the clock, the engine."""
        loop, every_s = asyncio.get_running_loop(), self.parts.deadlines.watch_s
        largest_group = max(env.group_size for env in self.config.envs)
        while True:
            started = loop.time()
            await asyncio.sleep(every_s)
            self._loop_lag_s = max(self._loop_lag_s, loop.time() - started - every_s)
            try:
                async with asyncio.timeout(self.parts.deadlines.state_s):
                    state = await self.parts.engine.state()
            except (TimeoutError, EngineError):
                continue  # publish and the players meet the same trouble, and report it
            self.limit = next_limit(self.limit, self._in_flight(), largest_group, state, self.settings.concurrency)
            self._can_collect.set()

    def stop(self, reason: str) -> None:
        """End the run: nothing new is issued or cut; what was shipped is trained, made live and evaluated. The first reason stands."""
        if self.reason is None:
            self.reason = reason
            self._can_collect.set()
            self._can_learn.set()

    # ---- start and end ----

    async def _restore(self) -> None:
        """Continue after the last step in the ledger. Rollouts that were in flight or ready when it ended are dropped."""
        ledger, trainer = self.parts.ledger, self.parts.trainer
        ledger.drop_open("restart")
        ledger.audit()
        unsent = [step for step, _ in ledger.unsent()]
        for step in trainer.staged():
            if step in unsent:
                await persist(lambda step=step: trainer.release(step), self.parts.deadlines.send_s, f"batch {step}")
            else:
                trainer.discard(step)
        for step in unsent:
            ledger.sent(step)
        self.step = ledger.last_step() + 1
        self._groups = int(ledger.last_group()[1:] or 0)
        self._credits = dict(ledger.last_state().get("credits", {}))

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            watch = self._tasks.create_task(self.watch())
            self._tasks.create_task(self.collect())
            self._tasks.create_task(self.learn())
            await self.publish()
            watch.cancel()

    async def _end(self, reason: str) -> None:
        await self.dispatcher.stop()
        self.parts.ledger.drop_open("drained" if self.reason else "stopped")
        closed, fate = self.queue.take_closed()
        if closed:
            await self.parts.store.write_rollouts(self.step, closed, {}, fate)
        await persist(lambda: self.parts.trainer.finish(reason), self.parts.deadlines.send_s, "the end of the run")

    # ---- collect ----

    def _gate(self) -> Gate:
        chosen, _ = next_env(self._credits, self._weights())
        return Gate(
            room=self._room(),
            in_flight=self._in_flight(),
            group_size=self.envs[chosen].config.group_size,
            limit=self.limit,
            now=asyncio.get_running_loop().time(),
            rate_opens_at=self._rate_opens_at,
            infra_opens_at=self.dispatcher.infra_opens_at,
        )

    def _room(self) -> float:
        if self.live is None:
            return 0.0
        outstanding = self.queue.outstanding(sum(len(group.pending) + group.num_gradable for group in self.open.values()))
        return room(self.live, self.step, self.settings.max_off_policy_steps, self.settings.batch, outstanding)

    def _in_flight(self) -> int:
        return len(self.dispatcher.flights) + self.evaluator.in_flight

    def _weights(self) -> dict[str, float]:
        return {label: bound.config.weight for label, bound in self.envs.items()}

    def _open_group(self) -> None:
        chosen, self._credits = next_env(self._credits, self._weights())
        bound = self.envs[chosen]
        self._groups += 1
        id, task, timeout_s = f"g{self._groups:08d}", self._draw(bound), bound.config.rollout_timeout_s

        def issue(rollout_id: str, attempt: int) -> Flight:
            assert self.live is not None  # without a live version there is no room
            flight = self.dispatcher.issue(bound.player, task, rollout_id, id, self.live, timeout_s, attempt)
            if attempt:
                self.parts.ledger.flush()  # the ledger knows a rollout before it starts; a new group is flushed as a whole
            return flight

        group = self.open[id] = Open(id, task, bound.config.group_size, issue)
        self.parts.ledger.flush()
        self._tasks.create_task(self._play(group, bound), name=id)
        if per_minute := self.settings.concurrency.tasks_per_minute:
            self._rate_opens_at = asyncio.get_running_loop().time() + 60.0 / per_minute

    def _draw(self, bound: BoundEnv) -> Task:
        """The next task. Its randomness comes from the seed and the number of the group, so there is no generator to save."""
        return draw(bound.env, "train", bound.curriculum.next(np.random.default_rng((self.config.seed, self._groups))))

    def _may_retry(self) -> bool:
        oldest = oldest_version(self.step, self.settings.max_off_policy_steps)
        return self.reason is None and self.live is not None and self.live >= oldest

    async def _play(self, group: Open, bound: BoundEnv) -> None:
        """One group, from its rollouts in flight to ready rollouts. Waits for its rollouts; see groups.play_group."""

        def ended(rollout: Any) -> None:
            self.queue.ended(rollout, draining=self.reason is not None)
            self._can_collect.set()

        closed = await play_group(group, self.settings, ended, self._may_retry)
        del self.open[group.id]
        verdict = judge(closed, bound.config, self.settings.filters, self.settings.min_group, self.config.model.seq_len)
        self.queue.admit(bound.config.label, verdict)
        if (rate := pass_rate(closed)) is not None:
            bound.curriculum.update(closed.task.index, rate)
        self.parts.ledger.flush()
        self._fruitless = fruitless_after(self._fruitless, closed, verdict)
        if self._fruitless >= self.settings.max_fruitless_groups:
            self.stop(
                f"fruitless: {self._fruitless} groups in a row gave nothing to train "
                f"({last_error(closed.rollouts) or 'rewards equal within each group'}); "
                "mend the environment or change the tasks' difficulty, or raise orchestrator.max_fruitless_groups"
            )
        self._can_learn.set()
        self._can_collect.set()

    # ---- learn ----

    def _out_of_time(self) -> bool:
        limit = self.config.max_minutes
        return limit is not None and asyncio.get_running_loop().time() - self._began >= 60.0 * limit

    async def _next_batch(self) -> list[Ready] | None:
        """The rollouts of batch `self.step`, which then moves on; None when the run stops first."""
        while self.reason is None:
            self._sweep()
            taken = self.queue.cut()
            if taken is not None:
                self.step += 1
                self._sweep()
                return taken
            await self._wait(self._can_learn, "ready", None, missed=lambda: self.queue.has_batch)
        return None

    def _sweep(self) -> None:
        """Let go of what the next batch may not train any more, ready or in flight."""
        self.queue.sweep(self.step)
        if self.settings.stale == "drop":
            self.dispatcher.cancel_stale(oldest_version(self.step, self.settings.max_off_policy_steps))
        self._can_collect.set()

    async def _ship(self, step: int, taken: list[Ready]) -> None:
        """Write the rollouts, stage the batch, enter it in the ledger, release it: a crash between any two is rolled forward or undone.

        Waits for: the disk.
        """
        ledger, trainer, send_s = self.parts.ledger, self.parts.trainer, self.parts.deadlines.send_s
        samples = [sample for item in taken for sample in item.samples]
        state = self._state(step)
        batch = await off_loop(routing_bytes(samples), lambda: make_batch(step, samples, self.config.trainer.row_tokens, state))
        lags = check_lag(batch, self.settings.max_off_policy_steps)
        closed, fate = self.queue.take_closed()
        await self.parts.store.write_rollouts(step, closed, {item.rollout_id: item.samples[0].advantage for item in taken}, fate)
        await persist(lambda: trainer.stage(batch), send_s, f"batch {step}")
        ledger.ship(step, [item.rollout_id for item in taken], batch_hash(batch), batch.orchestrator_state)
        groups = self.open.values()
        ledger.check(sum(len(group.pending) for group in groups), sum(group.num_gradable for group in groups) + len(self.queue.items))
        await persist(lambda: trainer.release(step), send_s, f"batch {step}")
        ledger.sent(step)
        self._report(step, taken, closed, lags)

    def _state(self, step: int) -> dict[str, Any]:
        """What a restart after this step continues from."""
        curricula = {label: bound.curriculum.state() for label, bound in self.envs.items()}
        return {"step": step, "groups": self._groups, "credits": self._credits, "curricula": curricula}

    def _report(self, step: int, taken: list[Ready], closed: list[Rollout], lags: dict[int, int]) -> None:
        ledger, metrics = self.parts.ledger, self.parts.metrics
        self.waited["update"], self.publisher.waited_s = self.publisher.waited_s, 0.0
        values = batch_metrics(taken, lags) | reward_metrics(closed, self.config.eval.success_reward)
        values |= counted("orchestrator/rollouts", ledger.outcomes) | counted("orchestrator/dropped", ledger.dropped)
        values |= counted("orchestrator/filter", self.queue.caught)
        values |= {f"orchestrator/time/wait_{name}_s": self.waited[name] for name in ("ready", "update", *Hold)}
        values |= {
            "orchestrator/in_flight/count": len(self.dispatcher.flights),
            "orchestrator/ready/samples": sum(len(item.samples) for item in self.queue.items),
            "orchestrator/concurrency/limit": self.limit,
            "orchestrator/loop/lag_s": self._loop_lag_s,
            "orchestrator/loop/missed_wakes": self.missed_wakes,
            "orchestrator/abandoned/count": self.dispatcher.abandoned,
            "orchestrator/curriculum/retired": sum(bound.curriculum.num_retired for bound in self.parts.envs),
        }
        metrics.log(step, values)
        metrics.event("lag_histogram", step=step, counts={str(lag): count for lag, count in lags.items()})
        self.waited.clear()
        self._loop_lag_s = 0.0

    # ---- evaluation ----

    async def _evaluate(self, final: bool = False) -> None:
        """Evaluate the live version if that is due. Newer versions wait meanwhile, for at most `eval_s`."""
        version, ledger, metrics = self.live, self.parts.ledger, self.parts.metrics
        if version is None or not is_due(version, ledger.last_eval(), self.config.eval, final):
            return
        try:
            async with asyncio.timeout(self.parts.deadlines.eval_s):
                results, rollouts = await self.evaluator.run(version)
        except TimeoutError:
            metrics.event("eval_abandoned", version=version, seconds=self.parts.deadlines.eval_s)
            return
        await self.parts.store.write_eval(version, rollouts)
        for env in [env for env, result in results.items() if not result.samples]:
            del results[env]
            metrics.event("eval_failed", version=version, env=env, error=last_error(r for r in rollouts if r.task.env == env))
        if not results:
            return
        ledger.record_eval(version, {env: result.as_dict() for env, result in results.items()})
        for env, result in results.items():
            fields = result.as_dict()
            metrics.event("eval", version=version, env=env, **fields)
            metrics.log(version, {f"orchestrator/eval/{env}/{name}": fields[name] for name in ("avg_at_k", "pass_at_k", "reward_mean")})
        target, reached = self.config.stop_at_eval, sum(result.avg_at_k for result in results.values()) / len(self.envs)
        if target is not None and reached >= target:
            self.stop("stop_at_eval")

    # ---- waiting ----

    async def _wait(self, wake: Wake, what: str, seconds: float | None, missed: Callable[[], bool]) -> None:
        """Wait for `wake`, at most `seconds` where the answer changes by itself then, else at most a while to look again."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        woken = await wake.wait(self.parts.deadlines.idle_s if seconds is None else seconds)
        self.waited[what] += loop.time() - started
        if not woken and seconds is None and missed():
            self.missed_wakes += 1
            self.parts.metrics.event("missed_wake", what=what)


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error of a task group: the others are its consequences, or its equals."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
