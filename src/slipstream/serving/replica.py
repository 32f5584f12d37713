"""One replica as the pool sees it: where it listens, whether it answers, and whether it has the current weights.

Knows how to bring a replica up (find it, connect, give it the current version), not when to use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from slipstream.errors import EngineUnavailable
from slipstream.ports import Engine, StreamingEngine
from slipstream.types import EngineState, PolicyVersion


class Endpoint(msgspec.Struct, frozen=True):
    """endpoints/engine-N.json of a run folder."""

    url: str
    token: str
    pid: int = 0


class ClosableEngine(Engine, StreamingEngine, Protocol):
    """An engine behind a connection."""

    async def close(self) -> None: ...


Connect = Callable[[Endpoint], ClosableEngine]


class Replica:
    """`up`: it answered last time and nothing has failed since. `synced`: its live weights are the ones the pool wants."""

    def __init__(self, file: Path, connect: Connect):
        self.file = file
        self.up = False
        self.synced = False
        self.in_flight = 0
        self._connect = connect
        self._endpoint: Endpoint | None = None
        self._engine: ClosableEngine | None = None

    @property
    def ready(self) -> bool:
        """Whether requests may go to it."""
        return self.up and self.synced

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def engine(self) -> ClosableEngine:
        """Raises EngineUnavailable before it was found for the first time."""
        if self._engine is None:
            raise EngineUnavailable(f"{self.name} has not been found yet: {self.file}")
        return self._engine

    def mark_down(self) -> None:
        self.up = self.synced = False

    async def bring_up(self, wanted: Callable[[], PolicyVersion | None]) -> EngineState:
        """Find it, and give it the wanted version when it has another one. Returns its state before that.

        `wanted()` is None while the pool knows no version: then any live version will do, and one without (-1) is up but gets no
        requests. Raises EngineUnavailable (nobody there, not yet) or EngineError (it refuses the version).
        """
        await self._find()
        state = await self.engine.state()
        live = (state.live_version, state.fingerprint)
        while (version := wanted()) is not None and (version.number, version.fingerprint) != live:
            await self.engine.prepare(version)
            await self.engine.commit(version.number)
            live = (version.number, version.fingerprint)
        # no await since the last look at wanted(): a commit of the pool cannot have passed this replica by
        self.up, self.synced = True, live[0] >= 0
        return state

    async def close(self) -> None:
        self.mark_down()
        if self._engine is not None:
            await self._engine.close()

    async def _find(self) -> None:
        """Read the endpoint file and connect anew when the replica has moved or was restarted."""
        endpoint = _read(self.file)
        if endpoint == self._endpoint:
            return
        if self._engine is not None:
            await self._engine.close()
        self._endpoint, self._engine = endpoint, self._connect(endpoint)


def _read(file: Path) -> Endpoint:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Endpoint)
    except FileNotFoundError:
        raise EngineUnavailable(f"{file} does not exist: the engine has not started yet, or has ended") from None
    except (msgspec.DecodeError, OSError) as error:
        raise EngineUnavailable(f"{file} cannot be read: {error}") from None


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
