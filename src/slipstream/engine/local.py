"""The embedded engine inside the caller's own event loop: the Engine port without a server.

For single-process commands (`eval`, `generate`), tests and benchmarks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from slipstream.engine.driver import EngineDriver, SteppedEngine


@asynccontextmanager
async def local_engine(engine: SteppedEngine) -> AsyncIterator[EngineDriver]:
    """The driver, which implements ports.Engine, with its step loop running until the block ends."""
    driver = EngineDriver(engine)
    task = asyncio.create_task(driver.drive())
    try:
        yield driver
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
