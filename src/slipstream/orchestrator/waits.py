"""How the orchestrator waits: events with deadlines, and durable writes that are tried again. Asyncio time only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slipstream.config.router import RouterConfig
from slipstream.errors import TrainerError

PERSIST_TRIES = 8


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that the run waits for each part before it looks, or tries, again."""

    prepare_s: float = 120.0
    """The engines load and verify new weights."""
    commit_s: float = 120.0
    """They swap them in between two decode steps; vLLM loads them and verifies what it computes."""
    state_s: float = 5.0
    send_s: float = 60.0
    """A batch becomes durable."""
    poll_s: float = 1.0
    """Between looks at whether the run ends, while waiting for the trainer."""
    idle_s: float = 10.0
    """Between looks at what should have been announced by a wake-up."""
    watch_s: float = 1.0
    """Between looks at the engine's load."""
    eval_s: float = 900.0
    """One evaluation, during which newer versions wait."""
    cancel_grace_s: float = 5.0
    """A cancelled player that has not ended by then is abandoned."""

    @classmethod
    def of_run(cls, router: RouterConfig) -> Deadlines:
        """Those of an update are longer than the pool's own, whose errors name the replica: one that is late, and then none that is up."""
        update_s = 2 * router.update_timeout_s + router.patience_s
        return cls(prepare_s=update_s, commit_s=update_s)


class Wake:
    """An event that one coroutine waits for and any number raise. A wake-up before the wait is not lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """True when woken, False at the deadline. Look at the condition again after either."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._event.clear()


async def persist(write: Callable[[], Awaitable[None]], timeout_s: float, what: str) -> None:
    """Await `write()`, which is idempotent, until it succeeds. Raises TrainerError after `PERSIST_TRIES` failures."""
    attempt = 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                return await write()
        except OSError as error:  # a full disk, a lost message, a deadline
            attempt += 1
            if attempt == PERSIST_TRIES:
                raise TrainerError(f"{what} cannot be handed to the trainer in {attempt} tries: {type(error).__name__}: {error}") from error
        await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
