"""One replica as the pool sees it: where it listens, whether it answers, and whether it has the current weights.

Knows how to bring a replica up (find it, connect, give it the current version), not when to use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from slipstream.errors import EngineUnavailable
from slipstream.ports import Engine, StreamingEngine
from slipstream.serving.members import Endpoint, Locate
from slipstream.serving.routing.breaker import Breaker
from slipstream.types import EngineState, PolicyVersion


class ClosableEngine(Engine, StreamingEngine, Protocol):
    """An engine behind a connection."""

    async def close(self) -> None: ...


Connect = Callable[[Endpoint], ClosableEngine]


class Replica:
    """`up`: it answered last time and nothing has failed since. `synced`: its live weights are the ones the pool wants."""

    def __init__(self, name: str, locate: Locate, connect: Connect, breaker: Breaker):
        self.name = name
        self.up = False
        self.synced = False
        self.told_to_drain = False
        """By this pool's caller; `draining` also counts what the replica says itself."""
        self.says_draining = False
        self.leaving = False
        """No longer a member of the pool: gone once its requests have ended."""
        self.breaker = breaker
        self._locate = locate
        self._connect = connect
        self._endpoint: Endpoint | None = None
        self._engine: ClosableEngine | None = None

    @property
    def draining(self) -> bool:
        return self.told_to_drain or self.says_draining or self.leaving

    @property
    def ready(self) -> bool:
        """Whether it could take requests, as far as the replica itself is concerned."""
        return self.up and self.synced and not self.draining

    def takes(self, now: float) -> bool:
        """Whether a request may go to it."""
        return self.ready and self.breaker.allows(now) and not self.prefills

    @property
    def prefills(self) -> bool:
        """Whether it only prefills for others."""
        return self._endpoint is not None and self._endpoint.role == "prefill"

    @property
    def handoff(self) -> str:
        """Where it hands blocks over now; '' when it does not."""
        return self._endpoint.handoff if self._endpoint is not None and self.prefills and self.ready else ""

    def why_not(self, now: float) -> str:
        """The word for a replica that takes no requests."""
        if not (self.up and self.synced):
            return "down"
        return "draining" if self.draining else "breaker" if not self.breaker.allows(now) else "busy"

    @property
    def engine(self) -> ClosableEngine:
        """Raises EngineUnavailable before it was found for the first time."""
        if self._engine is None:
            raise EngineUnavailable(f"{self.name} has not been found yet")
        return self._engine

    def mark_down(self) -> None:
        self.up = self.synced = False

    async def bring_up(self, wanted: Callable[[], PolicyVersion | None]) -> tuple[EngineState, bool]:
        """Find it, and give it the wanted version when it has another one. Returns its state before that, and whether it is a new process.

        `wanted()` is None while the pool knows no version: then any live version will do, and one without (-1) is up but gets no
        requests. Raises EngineUnavailable (nobody there, not yet) or EngineError (it refuses the version).
        """
        moved = await self._find()
        state = await self.engine.state()
        live = (state.live_version, state.fingerprint)
        while (version := wanted()) is not None and (version.number, version.fingerprint) != live:
            await self.engine.prepare(version)
            await self.engine.commit(version.number)
            live = (version.number, version.fingerprint)
        # no await since the last look at wanted(): a commit of the pool cannot have passed this replica by
        self.up, self.synced, self.says_draining = True, live[0] >= 0, state.draining
        return state, moved or state.live_version < 0

    async def close(self) -> None:
        self.mark_down()
        if self._engine is not None:
            await self._engine.close()

    async def _find(self) -> bool:
        """Look where it listens, and connect anew when it has moved or was restarted; whether it was."""
        endpoint = self._locate()
        if endpoint == self._endpoint:
            return False
        if self._engine is not None:
            await self._engine.close()
        self._endpoint, self._engine = endpoint, self._connect(endpoint)
        return True


async def keep_trying(attempt: Callable[[], Awaitable[object]], first_s: float, most_s: float) -> None:
    """Repeat until it no longer raises EngineUnavailable, with growing pauses. Other errors pass through."""
    pause_s = first_s
    while True:
        try:
            await attempt()
            return
        except EngineUnavailable:
            await asyncio.sleep(pause_s)
            pause_s = min(most_s, pause_s * 1.5)
