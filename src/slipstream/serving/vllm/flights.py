"""Requests in flight at vLLM: a gate that holds them while weights are replaced, abort, and the time that was busy with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slipstream.errors import EngineUnavailable
from slipstream.serving.vllm.api import Api

ABORT_AGAIN_S, ABORT_TIMEOUT_S = 0.02, 30.0
"""vLLM forgets an abort that overtakes its request: it is repeated until the request has ended."""


@dataclass(eq=False, slots=True)
class Flight:
    """One request."""

    salt: int
    sent: bool = False
    aborted: bool = False
    spoiled: bool = False
    """It ran under weights that turned out to be wrong."""
    answered: bool = False


class Flights:
    """By request id. Used from one event loop."""

    def __init__(self, api: Api) -> None:
        self.by_id: dict[str, Flight] = {}
        self.open = True
        """Whether requests are sent and answers are delivered: not while new weights wait for their verdict."""
        self.spans: list[tuple[float, float]] = []
        """Busy periods that have ended (seconds since the epoch); the reader empties it."""
        self._api = api
        self._changed = asyncio.Event()
        self._busy_s, self._busy_since = 0.0, 0.0

    @contextmanager
    def flight(self, request_id: str, salt: int) -> Iterator[Flight]:
        """Of one request, while the block runs."""
        if not self.by_id:
            self._busy_since = time.perf_counter()
        flight = self.by_id[request_id] = Flight(salt)
        try:
            yield flight
        finally:
            flight.answered = True
            del self.by_id[request_id]
            if not self.by_id:
                busy_s = time.perf_counter() - self._busy_since
                self._busy_s += busy_s
                self.spans.append((time.time() - busy_s, time.time()))

    @property
    def busy_s(self) -> float:
        """Seconds with a request in flight: vLLM does not say when it computes."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self.by_id else 0.0)

    def shut(self) -> None:
        """Nothing is sent or delivered until `reopen`."""
        self.open = False

    def reopen(self) -> None:
        self.open = True
        self._wake()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for a condition on flights and gate. Woken by: `abort`, `spoil`, `reopen`."""
        while not holds():
            await self._changed.wait()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Returns once they have ended. Raises EngineUnavailable when vLLM does not end them."""
        found = {name: self.by_id[name] for name in request_ids if name in self.by_id}
        for flight in found.values():
            flight.aborted = True
        self._wake()
        await self._end(found)

    async def spoil(self) -> None:
        """End what vLLM has; its answers are not delivered. Raises EngineUnavailable when vLLM does not end them."""
        spoiled = {name: flight for name, flight in self.by_id.items() if flight.sent}
        for flight in spoiled.values():
            flight.spoiled = True
        self._wake()
        await self._end(spoiled)

    async def _end(self, found: Mapping[str, Flight]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while left := [name for name, flight in found.items() if flight.sent and not flight.answered]:
                    await self._api.abort(left)
                    await asyncio.sleep(ABORT_AGAIN_S)
        except TimeoutError:
            raise EngineUnavailable(f"vLLM has not ended aborted requests within {ABORT_TIMEOUT_S:g} s") from None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
