"""The Engine port over several replicas: who gets which request, and that every one of them has the current weights.

    down --(a recovery task finds it and gives it the current version)--> ready --(a call fails)--> down

Requests of one rollout stay on one replica, whose prefix cache holds their beginning; a new rollout goes to the one with the fewest
requests in flight. A request whose replica fails is sent again to another one, or to the same one once it is back: from the start, or
from the tokens that its caller has heard already. Knows nothing of processes (a supervisor restarts them) and nothing of rollouts beyond
the request id.

Uses asyncio's clock only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.errors import EngineBusy, EngineError, EngineUnavailable, StateError
from slipstream.ports import Hear
from slipstream.serving.client import HttpEngine
from slipstream.serving.replica import ClosableEngine, Connect, Endpoint, Replica, keep_trying
from slipstream.serving.resume import Resumable
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 2.0
REMEMBERED_ROLLOUTS = 65536
MOST_SENDS = 4
"""Times that one request is sent before it is given up: a request that kills engines must not kill them for ever."""


class EnginePool:
    """Implements ports.Engine. `async with EnginePool.of_run(folder, replicas) as pool`, or call `close` at the end."""

    def __init__(self, endpoints: Sequence[Path], patience_s: float = 120.0, connect: Connect | None = None):
        """`endpoints`: files like endpoints/engine-0.json; they may appear later and change when a replica is restarted.

        `patience_s`: how long a call waits for a replica to be ready before it raises EngineUnavailable.
        """
        if not endpoints:
            raise StateError("an EnginePool needs at least one endpoint")
        self._replicas = [Replica(Path(file), connect or _connect_http) for file in endpoints]
        self._patience_s = patience_s
        self._current: PolicyVersion | None = None
        self._prepared: PolicyVersion | None = None
        self._home: OrderedDict[str, Replica] = OrderedDict()
        self._recovering: dict[Replica, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._last_error = "no replica has been found yet"

    @classmethod
    def of_run(cls, run_folder: Path, replicas: int, patience_s: float = 120.0) -> EnginePool:
        """The replicas of a run."""
        return cls([Path(run_folder) / "endpoints" / f"engine-{i}.json" for i in range(replicas)], patience_s)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ports.Engine. Waits for a replica while there is none; the caller's deadline bounds the whole."""
        return await self._on_one(request, lambda engine: engine.generate(request))

    async def stream(self, request: GenerateRequest, hear: Hear) -> Completion:
        """See ports.StreamingEngine. When a replica fails in the middle, another one goes on from the tokens that were heard."""
        begun = Resumable(request, hear)

        async def go_on(engine: ClosableEngine) -> Completion:
            before = begun.num_pieces
            return begun.whole(await engine.stream(begun.request, begun.hear), before)

        return await self._on_one(request, go_on)

    async def _on_one(self, request: GenerateRequest, ask: Callable[[ClosableEngine], Awaitable[Completion]]) -> Completion:
        busy: set[Replica] = set()
        sends = 0
        while True:
            replica = await self._pick(request.id, busy)
            replica.in_flight += 1
            try:
                return await ask(replica.engine)
            except EngineBusy:
                busy.add(replica)
                if all(other in busy for other in self._replicas if other.ready):
                    raise
            except EngineUnavailable as error:
                self._mark_down(replica, error)
                sends += 1
                if sends == MOST_SENDS:
                    raise
            finally:
                replica.in_flight -= 1

    async def prepare(self, version: PolicyVersion) -> None:
        """On every replica that answers; the others get the version when they come back. Waits for the first one.

        Raises EngineError when a replica refuses the weights.
        """

        await self._on_all(lambda replica: replica.engine.prepare(version))
        self._prepared = version

    async def commit(self, number: int) -> None:
        """On every replica that answers, preparing those that have come back since `prepare`. Idempotent."""
        version = self._version(number)

        async def one(replica: Replica) -> None:
            await replica.engine.prepare(version)  # costs nothing where it is prepared; needed by who came back since
            await replica.engine.commit(number)
            replica.synced = True

        self._current = version  # first: whoever comes back from now on gets this one
        await self._on_all(one)
        self._changed.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """On every replica that answers: a request may have moved."""
        await self._each(lambda replica: replica.engine.abort(request_ids), [r for r in self._replicas if r.up])

    async def state(self) -> EngineState:
        """Of the replicas that answer, as one: oldest live version, highest KV use, sums of the rest.

        Raises EngineUnavailable when none answers within the patience.
        """
        states: list[EngineState] = []

        async def one(replica: Replica) -> None:
            state = await replica.engine.state()
            if replica.synced and state.live_version < 0:
                raise EngineUnavailable(f"{replica.name} was restarted and has no live version")
            states.append(state)

        await self._on_all(one)
        return _combined(states)

    async def close(self) -> None:
        """Stop looking for replicas and close the connections. Idempotent."""
        tasks = list(self._recovering.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # ---- choosing ----

    async def _pick(self, request_id: str, busy: set[Replica]) -> Replica:
        """The replica of the request's rollout, else the one with the fewest requests; waits for one to be ready."""
        rollout = request_id.rpartition("/")[0] or request_id
        await self._until(lambda: any(replica.ready for replica in self._replicas))
        home = self._home.get(rollout)
        if home is None or not home.ready or home in busy:
            ready = [replica for replica in self._replicas if replica.ready]
            home = min([r for r in ready if r not in busy] or ready, key=lambda replica: replica.in_flight)
            self._home[rollout] = home
            if len(self._home) > REMEMBERED_ROLLOUTS:
                self._home.popitem(last=False)
        return home

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, woken by every replica that comes up. Raises EngineUnavailable after the patience."""
        self._recover_all()
        if holds():
            return
        try:
            async with asyncio.timeout(self._patience_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no engine was ready within {self._patience_s:g} s; last error: {self._last_error}") from None

    # ---- all replicas ----

    async def _on_all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Call every replica that is up, until at least one succeeded; those that fail as unavailable are brought up again later."""
        while True:
            await self._until(lambda: any(replica.up for replica in self._replicas))
            if await self._each(call, [replica for replica in self._replicas if replica.up]):
                return

    async def _each(self, call: Callable[[Replica], Awaitable[None]], replicas: Iterable[Replica]) -> int:
        """How many succeeded. Raises the first EngineError that is not unavailability."""
        replicas = list(replicas)
        results = await asyncio.gather(*(call(replica) for replica in replicas), return_exceptions=True)
        refusals = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, EngineUnavailable):
                self._mark_down(replica, result)
            elif isinstance(result, BaseException):
                refusals.append(result)
        if refusals:
            raise refusals[0]
        return sum(result is None for result in results)

    def _version(self, number: int) -> PolicyVersion:
        for version in (self._prepared, self._current):
            if version is not None and version.number == number:
                return version
        raise StateError(f"commit({number}): this version was never prepared; the last one prepared is {self._prepared}")

    # ---- going down and coming back ----

    def _mark_down(self, replica: Replica, error: Exception) -> None:
        if replica.up:
            log.warning("%s is down: %s", replica.name, error)
        self._last_error = str(error)
        replica.mark_down()
        self._recover_all()

    def _recover_all(self) -> None:
        """A recovery task for each replica that is down and has none."""
        for replica in self._replicas:
            if not replica.up and replica not in self._recovering:
                task = asyncio.get_running_loop().create_task(self._recover(replica))
                self._recovering[replica] = task
                task.add_done_callback(partial(self._recovered, replica))

    async def _recover(self, replica: Replica) -> None:
        """Waits for the replica's process; wakes whoever waits for a replica."""

        async def attempt() -> None:
            try:
                state = await replica.bring_up(lambda: self._current)
            except EngineUnavailable as error:
                self._last_error = str(error)
                raise
            except EngineError as error:
                self._last_error = str(error)
                log.error("%s does not come up: %s", replica.name, error)
                raise EngineUnavailable(str(error)) from error
            log.info("%s is up with version %d", replica.name, state.live_version)

        await keep_trying(attempt, FIRST_RETRY_S, LONGEST_RETRY_S)

    def _recovered(self, replica: Replica, task: asyncio.Task[None]) -> None:
        del self._recovering[replica]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._last_error = f"{replica.name}: {type(error).__name__}: {error}"
            log.error("recovery of %s failed", replica.name, exc_info=error)
        self._changed.set()


def _connect_http(endpoint: Endpoint) -> HttpEngine:
    return HttpEngine(endpoint.url, endpoint.token)


def _combined(states: Sequence[EngineState]) -> EngineState:
    oldest = min(states, key=lambda state: state.live_version)
    return replace(
        oldest,
        running=sum(state.running for state in states),
        waiting=sum(state.waiting for state in states),
        kv_used_frac=max(state.kv_used_frac for state in states),
        paused=any(state.paused for state in states),
        generated_tokens=sum(state.generated_tokens for state in states),
        busy_s=sum(state.busy_s for state in states),
        uptime_s=sum(state.uptime_s for state in states),
    )
