"""The replicas of a pool over time: who belongs to it, who is up, who has come back, who is slow, who drains.

    away --(found, and given the current version)--> up --(a call or a health check fails)--> away
    up --(drain)--> no new requests --(undrain)--> up

Membership follows the source: an endpoint file or an address that appears is a new replica, one that disappears is let go once its
requests have ended. Decides about no request; uses asyncio's clock only, so what hosts say of the time does not matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineError, EngineUnavailable, StateError
from slipstream.serving.members import Locate, Source
from slipstream.serving.replica import Connect, Replica, keep_trying
from slipstream.serving.routing.breaker import Breaker
from slipstream.serving.routing.router import Router
from slipstream.types import EngineState, PolicyVersion

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 2.0
FIND_EVERY_S = 10.0
"""Between two looks at who belongs to the pool."""


class Fleet:
    """Must be used from one event loop. `wanted()` is the version that every replica has to have."""

    def __init__(self, source: Source, config: RouterConfig, connect: Connect, router: Router, wanted: Callable[[], PolicyVersion | None]):
        self._source, self._config, self._connect, self._router, self._wanted = source, config, connect, router, wanted
        self._replicas: dict[str, Replica] = {}
        self._recovering: dict[Replica, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._looked_s = float("-inf")
        self.last_error = "no replica has been found yet"
        self.counts: Counter[str] = Counter()
        """down, slow, joined, left."""
        self._admit(source.expected)

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def named(self, name: str) -> Replica:
        """Raises StateError for a name that is none."""
        if (replica := self._replicas.get(name)) is None:
            raise StateError(f"no replica is named {name!r}; there are {', '.join(sorted(self._replicas)) or 'none'}")
        return replica

    def why_not(self, name: str) -> str:
        """The word for why a request that belonged there cannot go there."""
        replica = self._replicas.get(name)
        return "left" if replica is None else replica.why_not(self.now())

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- waiting ----

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, woken by every change here. Raises EngineUnavailable after the patience."""
        self._start()
        if holds():
            return
        try:
            async with asyncio.timeout(self._config.patience_s):
                while not holds():
                    self._changed.clear()
                    await self._woken()
        except TimeoutError:
            raise EngineUnavailable(
                f"no engine was ready within router.patience_s = {self._config.patience_s:g} s; last error: {self.last_error}"
            ) from None

    def wake(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._changed.set()

    async def drain(self, name: str) -> None:
        """No new requests for it; returns once those in flight have ended. The caller sets the deadline; `undrain` takes it back."""
        replica = self.named(name)
        replica.told_to_drain = True
        while self._router.in_flight(name):
            self._changed.clear()
            await self._changed.wait()
        log.info("%s is drained", replica.name)

    def undrain(self, name: str) -> None:
        self.named(name).told_to_drain = False
        self.wake()

    async def close(self) -> None:
        """Stop looking for replicas and close the connections. Idempotent."""
        tasks = [*self._recovering.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watching = None
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    # ---- going down and coming back ----

    def failed(self, replica: Replica, error: Exception, probe: bool = False) -> None:
        """A call failed as unavailable. Further failures while it is down belong to the same incident."""
        if replica.up:
            log.warning("%s is down: %s; it gets requests again once it answers and has the current version", replica.name, error)
            self.counts["down"] += 1
            replica.breaker.ended(probe, False, self.now())
        self.last_error = f"{replica.name}: {error}"
        replica.mark_down()
        self._recover_all()

    def _start(self) -> None:
        self._recover_all()
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def _recover_all(self) -> None:
        """A recovery task for each replica that is down and has none."""
        for replica in self.replicas:
            if not replica.up and not replica.leaving and replica not in self._recovering:
                task = asyncio.get_running_loop().create_task(self._recover(replica))
                self._recovering[replica] = task
                task.add_done_callback(partial(self._recovered, replica))

    async def _recover(self, replica: Replica) -> None:
        """Waits for the replica's process; wakes whoever waits for a replica. Says once why it does not come up."""
        said = ""

        async def attempt() -> None:
            nonlocal said
            try:
                state, fresh = await replica.bring_up(self._wanted)
            except EngineUnavailable as error:
                self.last_error = f"{replica.name}: {error}"
                raise
            except EngineError as error:
                self.last_error = f"{replica.name}: {error}"
                if said != str(error):
                    log.error("%s does not come up: %s", replica.name, error)
                said = str(error)
                raise EngineUnavailable(str(error)) from error
            if fresh:
                self._router.restarted(replica.name)
                replica.breaker.reset()
            self._router.observe(replica.name, state)
            log.info("%s is up with version %d", replica.name, state.live_version)

        await keep_trying(attempt, FIRST_RETRY_S, LONGEST_RETRY_S)

    def _recovered(self, replica: Replica, task: asyncio.Task[None]) -> None:
        del self._recovering[replica]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.last_error = f"{replica.name}: {type(error).__name__}: {error}"
            log.error("recovery of %s failed", replica.name, exc_info=error)
        else:
            self._recover_all()  # it may have gone down again before this call
        self.wake()

    async def _woken(self) -> None:
        """A change, or a breaker that lets a request through again."""
        now = self.now()
        waits = [seconds for replica in self.replicas if (seconds := replica.breaker.opens_in(now)) is not None]
        try:
            async with asyncio.timeout(min(waits) if waits else None):
                await self._changed.wait()
        except TimeoutError:
            pass

    # ---- membership and health ----

    async def _watch(self) -> None:
        while True:
            if self.now() - self._looked_s >= FIND_EVERY_S or not self._replicas:
                await self._find()
            await self._let_go()
            self._recover_all()
            await asyncio.gather(*(self._check(replica) for replica in self.replicas if replica.up))
            self._keep_out_the_slow()
            await asyncio.sleep(self._config.health_interval_s)

    async def _find(self) -> None:
        self._looked_s = self.now()
        try:
            async with asyncio.timeout(self._config.health_deadline_s):
                found = await self._source.find()
        except (EngineUnavailable, TimeoutError) as error:
            self.last_error = str(error) or "looking for replicas took too long"
            log.warning("the pool stays as it is: %s", self.last_error)
            return
        self._admit({name: locate for name, locate in found.items() if name not in self._replicas})
        for name, replica in self._replicas.items():
            replica.leaving = name not in found
        self._recover_all()

    def _admit(self, members: Mapping[str, Locate]) -> None:
        config = self._config
        for name, locate in members.items():
            breaker = Breaker(config.breaker_failures, config.breaker_open_s, config.breaker_most_s)
            self._replicas[name] = Replica(name, locate, self._connect, breaker)
            self.counts["joined"] += 1

    async def _let_go(self) -> None:
        """Of replicas that are no longer members and have nothing in flight."""
        for replica in self.replicas:
            if replica.leaving and not self._router.in_flight(replica.name):
                log.info("%s has left", replica.name)
                if (task := self._recovering.get(replica)) is not None:
                    task.cancel()
                del self._replicas[replica.name]
                self._router.removed(replica.name)
                self.counts["left"] += 1
                await replica.close()

    async def _check(self, replica: Replica) -> None:
        """One health check. Refusals are for the caller of the pool to see; here only silence counts."""
        try:
            async with asyncio.timeout(self._config.health_deadline_s):
                state = await replica.engine.state()
        except TimeoutError:
            self.failed(replica, EngineUnavailable(f"no state within {self._config.health_deadline_s:g} s"))
        except EngineUnavailable as error:
            self.failed(replica, error)
        except EngineError as error:
            log.error("health check of %s: %s", replica.name, error)
        else:
            self.seen(replica, state)

    def seen(self, replica: Replica, state: EngineState) -> None:
        """What it says about itself. Without a live version although it had one, it is another process at the same address."""
        if replica.synced and state.live_version < 0:
            self.failed(replica, EngineUnavailable("it was restarted and has no live version"))
            return
        self._router.observe(replica.name, state)
        if replica.says_draining != state.draining:
            log.info("%s %s", replica.name, "drains" if state.draining else "takes requests again")
            replica.says_draining = state.draining
            self.wake()

    def _keep_out_the_slow(self) -> None:
        """For a while, and never the last one: afterwards one request shows whether it is still slow."""
        usable = [replica.name for replica in self.replicas if replica.takes(self.now())]
        if (name := self._router.slow(usable)) is not None:
            log.warning("%s is slow: it takes more than router.slow_factor times as long for a token as the others", name)
            self.counts["slow"] += 1
            self.named(name).breaker.trip(self.now())
            self._router.forgive(name)
