"""An event loop whose time is virtual: when nothing is left to do now, the clock jumps to the next timer.

A run of hours takes milliseconds, and the order of events is a function of the program alone. When nothing is scheduled at all, nothing
can ever happen again: that is a deadlock, and raises.
"""

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine
from typing import Any


class DeadlockError(Exception):
    """Every task waits for something that nobody will do."""


class _JumpingSelector(selectors.BaseSelector):
    """No files; waiting moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj, events, data=None):
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj):
        return self._keys.pop(fileobj)

    def select(self, timeout=None):
        if timeout is None:
            raise DeadlockError("nothing is ready and no timer is set")
        self.now += max(timeout, 0.0)
        return []

    def get_map(self):
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio with virtual time, from 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on virtual time. Tasks that are left over are cancelled until they give in."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        with contextlib.suppress(DeadlockError):
            loop.run_until_complete(kill(set()))
        loop.close()


async def kill(spared: set[asyncio.Task]) -> None:
    """Cancel every task but this one and `spared`, in the order of their creation, again and again until all have ended."""
    while left := sorted(asyncio.all_tasks() - spared - {asyncio.current_task()}, key=_age):
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.001)
        for task in left:
            if task.done() and not task.cancelled():
                task.exception()  # seen: it dies with its process


def _age(task: asyncio.Task) -> tuple[bool, int, str]:
    kind, _, number = task.get_name().partition("-")
    return (kind == "Task", int(number) if kind == "Task" else 0, task.get_name())
