"""Waiting in tests: for something that happens, not for a time. Bounds are for what hangs, and no machine is too slow for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HUNG_S = 240.0
"""What takes longer than this will never end."""
RUN_S = 1200.0
"""The same for a whole run of a command: some forty times what it takes on two idle cores."""


async def until(holds: Callable[[], object]) -> None:
    """Let the loop go on until it holds."""
    async with asyncio.timeout(HUNG_S):
        while not holds():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)


def wait_until(holds: Callable[[], object], seconds: float = HUNG_S) -> None:
    """Wait until it holds, without a loop: for what other processes and threads do."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it has not come about in {seconds:g} s"
        time.sleep(0.01)


def pass_deadlines(seconds: float = 1e4) -> None:
    """Set the clock of the running loop ahead: every deadline that was set before is over, and what came before it has come."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds
