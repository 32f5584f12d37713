"""An environment's code that stops the whole process: noticed from outside Python, and traced to the rollout it belongs to.

A coroutine that blocks, or C code that keeps the interpreter's lock (a regular expression that backtracks for ever), leaves no Python
thread able to look. The watchdog is therefore faulthandler's thread, which needs no lock: unless `arm` is called again in time, it
writes every stack to a file and ends the process. Each rollout plays in a frame that bears its name, so that the stacks tell whose
they are. Knows nothing of who starts the process again.
"""

from __future__ import annotations

import contextvars
import faulthandler
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from slipstream.types import Task

T = TypeVar("T")

_NAMED = re.compile(r" in rollout (\S+) env (\S+) task (\S+)$", re.MULTILINE)
_name: contextvars.ContextVar[str] = contextvars.ContextVar("rollout", default="code of no rollout")


def dump_file(run_folder: Path) -> Path:
    """Where the stacks of frozen orchestrators of a run are: appended to, so what an earlier process froze in stays known."""
    return run_folder / "logs" / "orchestrator.frozen"


class Watchdog:
    """Ends this process, with all stacks in `file`, once `limit_s` seconds have passed since `arm`. One in a process."""

    def __init__(self, file: Path, limit_s: float):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a+")
        self._limit_s = limit_s
        self._file.seek(0)
        self.seen = suspects(self._file.read())
        """What earlier processes were playing when they froze."""

    def arm(self) -> None:
        """All is well for now. Some tens of microseconds."""
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._file)

    def close(self) -> None:
        """Stop watching."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()


def suspects(dump: str) -> dict[tuple[str, str], str]:
    """(environment, task id) -> rollout id of everything that was being played in a frozen process, from the text of its dump.

    The culprit is among them; code that merely waited in a thread is too, for nothing tells them apart.
    """
    found = (tuple(map(unquote, groups)) for groups in _NAMED.findall(dump))
    return {(env, task): rollout for rollout, env, task in found}


async def play_named(rollout_id: str, task: Task, play: Callable[[], Awaitable[T]]) -> T:
    """`await play()` in a frame that a stack dump shows as this rollout; the same for its calls in threads (see `named`)."""
    _name.set(f"rollout {quote(rollout_id)} env {quote(task.env)} task {quote(task.id)}")
    return await _named(_await, _name.get())(play)


def named(fn: Callable[..., T]) -> Callable[..., T]:
    """`fn` in a frame that bears the name of the rollout that is being played here; for calling it in a thread."""
    call = _named(_call, _name.get())
    return lambda *args: call(fn, args)


async def _await(play: Callable[[], Awaitable[T]]) -> T:
    return await play()


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(*args)


def _named(template: Any, name: str) -> Callable[..., Any]:
    return FunctionType(template.__code__.replace(co_name=name), template.__globals__, name)
