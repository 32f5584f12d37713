"""The Engine port over several replicas: every request reaches one of them or ends with a typed error, and every replica has the current
weights.

Which replica: `routing.router`. Who is up: `fleet`. Here: what happens to one request. One whose replica fails has produced nothing for
its caller, so it is sent again to another one, or to the same one once it is back. What is refused is counted by reason. Knows nothing of
processes (a supervisor restarts them) and nothing of rollouts beyond the request id.

Uses asyncio's clock only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineBusy, EngineUnavailable, StateError
from slipstream.ports import Hear
from slipstream.serving.client import HttpEngine
from slipstream.serving.fleet import Fleet
from slipstream.serving.members import Endpoint, FolderSource, Source, source_of
from slipstream.serving.replica import ClosableEngine, Connect, Replica
from slipstream.serving.resume import Resumable
from slipstream.serving.routing.metrics import values
from slipstream.serving.routing.router import Ask, Router, Sent
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion

MOST_SENDS = 4
"""Times that one request is sent before it is given up: a request that kills engines must not kill them for ever."""


Call = Callable[[ClosableEngine, GenerateRequest], Awaitable[Completion]]
"""One request to one engine."""


class RouterFull(EngineBusy):
    """More requests wait for a replica than router.max_waiting."""


class EnginePool:
    """Implements ports.Engine. `async with EnginePool.of_run(folder, replicas) as pool`, or call `close` at the end."""

    def __init__(self, source: Source, config: RouterConfig | None = None, connect: Connect | None = None):
        """`source`: who belongs to it; see `members`."""
        self._config = config or RouterConfig()
        self.router = Router(self._config)
        self.fleet = Fleet(source, self._config, connect or self._connect, self.router, lambda: self._current)
        self._current: PolicyVersion | None = None
        self._prepared: PolicyVersion | None = None
        self._waiting = 0
        self.retries = 0
        """Requests sent again after a failure."""
        self.rejections: Counter[str] = Counter()
        """Requests that ended without an answer: full, busy, unavailable, given_up, refused, cancelled."""
        self.answers = 0

    @classmethod
    def of_run(cls, run_folder: Path, replicas: int, config: RouterConfig | None = None) -> EnginePool:
        """The replicas of a run, or those that router.urls names. Raises ConfigError when these need a token and there is none."""
        folder = Path(run_folder)
        return cls(source_of(config, folder, replicas) if config else FolderSource(folder / "endpoints", replicas), config)

    # ---- requests ----

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ports.Engine. Waits for a replica while there is none; the caller's deadline bounds the whole."""
        return await self._counted(request, lambda engine, sent: engine.generate(sent))

    async def stream(self, request: GenerateRequest, hear: Hear) -> Completion:
        """See ports.StreamingEngine. When a replica fails in the middle, another one goes on from the tokens that were heard."""
        begun = Resumable(request, hear)

        async def go_on(engine: ClosableEngine, _: GenerateRequest) -> Completion:
            before = begun.num_pieces
            return begun.whole(await engine.stream(begun.request, begun.hear), before)

        return await self._counted(request, go_on)

    async def _counted(self, request: GenerateRequest, call: Call) -> Completion:
        """Every request is an answer or a rejection in the books."""
        try:
            completion = await self._on_one(request, call)
        except _Rejected as rejected:
            self.rejections[rejected.reason] += 1
            raise rejected.error from None
        except asyncio.CancelledError:
            self.rejections["cancelled"] += 1
            raise
        except Exception:  # the engine says that this request can never succeed
            self.rejections["refused"] += 1
            raise
        self.answers += 1
        return completion

    async def _on_one(self, request: GenerateRequest, call: Call) -> Completion:
        """`call` on one replica, and on another when that one fails."""
        ask, busy, sends = self.router.ask(request), set[str](), 0
        while True:
            replica, sent, probe = await self._take(ask, busy)
            away = self.router.elsewhere(sent, {r.name: r.handoff for r in self.fleet.replicas if r.handoff}, self.fleet.now())
            engine, ok = replica.engine, None
            try:
                completion = await call(engine, replace(request, prefill_at=away.address) if away else request)
                ok = True
                if away:
                    self.router.prefills.answered(away, completion, self.fleet.now())
                self.router.answered(sent, completion, self.fleet.now())
                return completion
            except EngineBusy as error:
                busy.add(replica.name)
                if not self._usable(busy):
                    _reject("busy", error)
            except EngineUnavailable as error:
                if engine is replica.engine:  # otherwise another process has taken its place: this one has failed nobody
                    self.fleet.failed(replica, error, probe)
                sends += 1
                if sends == MOST_SENDS:
                    _reject("given_up", error)
                self.retries += 1
            finally:
                self.router.ended(sent)
                if away:
                    self.router.prefills.ended(away)
                replica.breaker.ended(probe, ok, self.fleet.now())
                if probe or replica.draining:
                    self.fleet.wake()

    async def _take(self, ask: Ask, busy: set[str]) -> tuple[Replica, Sent, bool]:
        """A replica for the request, booked. Waits, within bounds, while none may take it."""
        if not self._usable(busy):
            await self._wait(lambda: bool(self._usable(set())))
        now = self.fleet.now()
        usable = self._usable(busy) or self._usable(set())
        sent = self.router.choose(ask, [replica.name for replica in usable], self.fleet.why_not, now)
        replica = self.fleet.named(sent.replica)
        return replica, sent, replica.breaker.sent(now)

    def _usable(self, busy: set[str]) -> list[Replica]:
        now = self.fleet.now()
        return [replica for replica in self.fleet.replicas if replica.takes(now) and replica.name not in busy]

    async def _wait(self, holds: Callable[[], bool]) -> None:
        if self._waiting >= self._config.max_waiting:
            _reject("full", RouterFull(f"router.max_waiting = {self._config.max_waiting} requests wait for a replica already; try later"))
        self._waiting += 1
        try:
            await self.fleet.until(holds)
        except EngineUnavailable as error:
            _reject("unavailable", error)
        finally:
            self._waiting -= 1

    async def abort(self, request_ids: Sequence[str]) -> None:
        """On every replica that answers: a request may have moved."""
        await self._each(lambda replica: replica.engine.abort(request_ids), [r for r in self.fleet.replicas if r.up])

    # ---- weights ----

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
        self.fleet.wake()

    def _version(self, number: int) -> PolicyVersion:
        for version in (self._prepared, self._current):
            if version is not None and version.number == number:
                return version
        raise StateError(f"commit({number}): this version was never prepared; the last one prepared is {self._prepared}")

    # ---- what it says about itself ----

    async def state(self) -> EngineState:
        """Of the replicas that answer, as one: oldest live version, highest KV use, sums of the rest.

        Raises EngineUnavailable when none answers within the patience.
        """
        states: list[EngineState] = []

        async def one(replica: Replica) -> None:
            state = await replica.engine.state()
            if replica.synced and state.live_version < 0:
                raise EngineUnavailable("it was restarted and has no live version")
            self.fleet.seen(replica, state)
            states.append(state)

        await self._on_all(one)
        return _combined(states)

    def metrics(self) -> dict[str, float]:
        """Every router metric, now."""
        return values(self.router, self.fleet.replicas, self.fleet.now()) | {
            "router/requests/waiting": self._waiting,
            "router/retries/count": self.retries,
            "router/slow/count": self.fleet.counts["slow"],
            "router/down/count": self.fleet.counts["down"],
            **{f"router/prefills/{name}": self.router.prefills.counts[name] for name in ("there", "here", "tokens", "came")},
            **{f"router/rejections/{reason}": count for reason, count in self.rejections.items()},
        }

    async def close(self) -> None:
        """Stop looking for replicas and close the connections. Idempotent."""
        await self.fleet.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # ---- all replicas ----

    def _connect(self, endpoint: Endpoint) -> HttpEngine:
        return HttpEngine(endpoint.url, endpoint.token, update_timeout_s=self._config.update_timeout_s)

    async def _on_all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Call every replica that is up, until at least one succeeded; those that fail as unavailable are brought up again later."""
        while True:
            await self.fleet.until(lambda: any(replica.up for replica in self.fleet.replicas))
            if await self._each(call, [replica for replica in self.fleet.replicas if replica.up]):
                return

    async def _each(self, call: Callable[[Replica], Awaitable[None]], replicas: Iterable[Replica]) -> int:
        """How many succeeded. Raises the first EngineError that is not unavailability."""
        replicas = list(replicas)
        results = await asyncio.gather(*(call(replica) for replica in replicas), return_exceptions=True)
        refusals = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, EngineUnavailable):
                self.fleet.failed(replica, result)
            elif isinstance(result, BaseException):
                refusals.append(result)
        if refusals:
            raise refusals[0]
        return sum(result is None for result in results)


class _Rejected(Exception):
    """A request ends here; `error` is what its caller sees."""

    def __init__(self, reason: str, error: EngineUnavailable):
        self.reason, self.error = reason, error


def _reject(reason: str, error: EngineUnavailable) -> NoReturn:
    raise _Rejected(reason, error)


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
        kv_tokens=sum(state.kv_tokens for state in states),
        draining=all(state.draining for state in states),
    )
