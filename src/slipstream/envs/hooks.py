"""Calls into an environment's own code, under a deadline, without ever blocking the event loop.

`async def` hooks run on the loop (they must not block; see `frozen` for those that do). Plain `def` hooks run in a daemon worker
thread. One that misses its deadline is abandoned and counted, and the next call gets another thread; `AbandonedError` is raised in it,
which ends Python code that spins, but not a call into C that never returns. Knows nothing of tasks or rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

from slipstream.envs.frozen import named
from slipstream.errors import EnvError

MAX_HUNG = 32
"""Abandoned threads in one process after which new calls are refused: the environment is broken, and each holds memory."""


class AbandonedError(BaseException):
    """Raised in a hook that nobody waits for any more, between two of its bytecodes. Not an Exception: it is not for hooks to handle."""


async def run_hook(fn: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """`fn(*args)`, awaited on the loop when it is a coroutine function, else called in a worker thread.

    Raises what `fn` raises, and EnvError when it takes longer than `timeout` seconds or too many earlier calls still hang.
    """
    if not inspect.iscoroutinefunction(fn):
        return await _WORKERS.call(fn, args, timeout)
    deadline = asyncio.timeout(timeout)
    try:
        async with deadline:
            return await fn(*args)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise _too_slow(fn, timeout) from None


def hung_threads() -> int:
    """Worker threads that were abandoned and have not returned since."""
    return _WORKERS.hung


class Workers:
    """Daemon threads that are reused while they return in time.

    Every call gets a thread at once (no queue that a slow hook could block), so a deadline measures the hook alone. The number of
    threads is bounded by the calls in flight, which the orchestrator's concurrency bounds.
    """

    def __init__(self, max_hung: int = MAX_HUNG):
        self.max_hung = max_hung
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._hung: set[_Call] = set()

    @property
    def hung(self) -> int:
        return len(self._hung)

    async def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
        """The result of `fn(*args)` from a worker thread; see `run_hook`."""
        if self.hung >= self.max_hung:
            raise EnvError(
                f"{_name(fn)}: {self.hung} earlier environment calls still hang in their threads (limit {self.max_hung}). "
                "Find the call that never returns, give it a timeout of its own, and restart"
            )
        call = _Call(fn, args, asyncio.get_running_loop())
        with self._lock:
            call.worker = self._idle.pop() if self._idle else _Worker(self._done)
            call.worker.serve(call)
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await call.result
        except TimeoutError:
            if not deadline.expired():
                raise
            raise _too_slow(fn, timeout) from None
        finally:
            self._abandon_unless_finished(call)

    def _abandon_unless_finished(self, call: _Call) -> None:
        with self._lock:
            if not call.finished:
                call.abandoned = True
                self._hung.add(call)
                call.worker.interrupt()  # under the lock: a worker is idle again or interrupted, never both

    def _done(self, worker: _Worker, call: _Call) -> bool:
        """Runs in the worker thread once its call has returned, however late. Whether the thread goes on; asked again after a no."""
        with self._lock:
            call.finished = True
            self._hung.discard(call)
            if not call.abandoned:
                worker.serving = None  # an idle thread must not keep the last conversation alive
                self._idle.append(worker)
            return not call.abandoned


class _Call:
    """One function call on its way through a worker thread and back to the loop that made it."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], loop: asyncio.AbstractEventLoop):
        self.fn, self.args, self.loop = fn, args, loop
        self._call = named(fn)
        self.worker: _Worker
        self.abandoned = False
        self.result: asyncio.Future[Any] = loop.create_future()
        self.finished = False

    def run(self) -> Callable[[], None]:
        """Call the function; returns how to settle the future, to be run on the loop."""
        try:
            value = self._call(*self.args)
        except BaseException as error:  # an environment may raise SystemExit; a worker thread must survive it
            failure = error if isinstance(error, Exception) else EnvError(f"{_name(self.fn)} raised {type(error).__name__}: {error}")
            return lambda: None if self.result.done() else self.result.set_exception(failure)
        return lambda: None if self.result.done() else self.result.set_result(value)


class _Worker:
    """A daemon thread: it never keeps the process from ending."""

    def __init__(self, done: Callable[[_Worker, _Call], bool]):
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._done = done
        self.serving: _Call | None = None
        self._thread = threading.Thread(target=self._run, name="env-hook", daemon=True)
        self._thread.start()

    def serve(self, call: _Call) -> None:
        self.serving = call
        self._calls.put(call)

    def interrupt(self) -> None:
        """Raise AbandonedError in the thread as soon as it executes Python again. It serves no further call."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(AbandonedError))

    def _run(self) -> None:
        try:
            while True:
                call = self._calls.get()
                settle, loop = call.run(), call.loop
                if not self._done(self, call):
                    return
                del call
                with contextlib.suppress(RuntimeError):  # the loop has ended since: nobody waits
                    loop.call_soon_threadsafe(settle)
                del settle
        except AbandonedError:  # not in the hook, but just before or after it
            if self.serving is not None:
                self._done(self, self.serving)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _too_slow(fn: Callable[..., Any], timeout: float) -> EnvError:
    return EnvError(f"{_name(fn)} did not return within {timeout:g} s (turn_timeout_s)")


_WORKERS = Workers()
