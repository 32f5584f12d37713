"""The embedded engine inside the caller's own event loop: the Engine port without a server.

For single-process commands (`eval`, `generate`), tests and benchmarks. The step loop runs as a task of the same loop, as it does
in the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress

from slipstream.engine.engine import EmbeddedEngine
from slipstream.errors import EngineUnavailable
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion


class LocalEngine:
    """Implements ports.Engine around one EmbeddedEngine. Use as `async with local_engine(engine) as port`."""

    def __init__(self, engine: EmbeddedEngine):
        self.engine = engine
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._work = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.engine.add(request)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._work.set()
        try:
            return await future
        except asyncio.CancelledError:
            self.engine.abort([request.id])
            raise
        finally:
            self._waiting.pop(request.id, None)

    async def prepare(self, version: PolicyVersion) -> None:
        self.engine.prepare(version)

    async def commit(self, number: int) -> None:
        self.engine.commit(number)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.engine.abort(request_ids)
        self._work.set()

    async def state(self) -> EngineState:
        return self.engine.state()

    async def drive(self) -> None:
        """Step while there is work; sleep until a request arrives otherwise. A failing step fails every waiting request."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self.engine.has_work:
                try:
                    result = self.engine.step()
                except Exception as error:
                    self._fail(error)
                    raise
                for completion in result.finished:
                    future = self._waiting.get(completion.id)
                    if future is not None and not future.done():
                        future.set_result(completion)
                await asyncio.sleep(0)

    def _fail(self, error: Exception) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineUnavailable(f"the engine's step failed: {type(error).__name__}: {error}"))


@asynccontextmanager
async def local_engine(engine: EmbeddedEngine):
    """The port, with its step loop running until the block ends."""
    port = LocalEngine(engine)
    task = asyncio.create_task(port.drive())
    try:
        yield port
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
