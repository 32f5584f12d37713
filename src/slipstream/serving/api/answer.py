"""The calls of one HTTP request on their way: started together, heard through one queue, answered at once or as server-sent events.

Leaving early (the client went away, one call failed) aborts those that are still running. Knows no API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from slipstream.errors import EngineError
from slipstream.serving.api.http import error_body, is_anthropic, note_error
from slipstream.serving.api.port import Call
from slipstream.types import Completion, TokenPiece

Event = tuple[int, "TokenPiece | Completion"]
"""(index of the call, tokens or the completion). The completion's tokens that came in no piece before are news too: see `Tail`."""
STREAMS = web.AppKey("streams", list[int])
"""[streams that are open now], where an application counts them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One call, and how the client sees its completion."""

    call: Call
    reply: Callable[[Completion], dict[str, Any]]


async def completions(parts: Sequence[Part]) -> list[Completion]:
    """Of all calls, in their order."""
    found: dict[int, Completion] = {}
    async with _running(parts, streamed=False) as events:
        while len(found) < len(parts):
            index, event = await _next(events)
            assert isinstance(event, Completion)
            found[index] = event
    return [found[i] for i in range(len(parts))]


async def stream(request: web.Request, parts: Sequence[Part], render: Callable[[AsyncIterator[Event]], AsyncIterator[bytes]]):
    """Answers with the chunks that `render` makes of the events. An error before the first event has a status of its own; a later one is
    an event too, for the status has gone out already."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
    open_streams = request.app.get(STREAMS, [0])
    async with _running(parts, streamed=True) as events:
        first = await _next(events)
        open_streams[0] += 1
        try:
            await response.prepare(request)
            async for chunk in render(_in_order(first, events, len(parts))):
                await response.write(chunk)
        except EngineError as error:
            note_error(request, error)
            await response.write(sse(error_body(error, is_anthropic(request)), "error" if is_anthropic(request) else None))
        finally:
            open_streams[0] -= 1
    return response


def sse(payload: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + msgspec.json.encode(payload) + b"\n\n"


class Tail:
    """What of a completion has not been heard in pieces."""

    def __init__(self) -> None:
        self._heard = 0

    def news(self, event: TokenPiece | Completion) -> tuple[list[int], list[float]]:
        """New tokens and their logprobs."""
        start, self._heard = (self._heard if isinstance(event, Completion) else 0), self._heard + len(event.tokens_N)
        return np.asarray(event.tokens_N[start:]).tolist(), np.asarray(event.logprobs_N[start:]).tolist()


@asynccontextmanager
async def _running(parts: Sequence[Part], streamed: bool) -> AsyncIterator[asyncio.Queue[tuple[int, Any]]]:
    events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def one(index: int, part: Part) -> None:
        try:
            completion = await part.call.run((lambda piece: events.put_nowait((index, piece))) if streamed else None)
            part.call.done(completion, partial(part.reply, completion))  # before anything can be cancelled: what was sampled is recorded
            events.put_nowait((index, completion))
        except Exception as error:
            events.put_nowait((index, error))

    tasks = [asyncio.create_task(one(i, part)) for i, part in enumerate(parts)]
    try:
        yield events
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for part in parts:
            part.call.drop()


async def _next(events: asyncio.Queue[tuple[int, Any]]) -> Event:
    index, event = await events.get()
    if isinstance(event, Exception):
        raise event
    return index, event


async def _in_order(first: Event, events: asyncio.Queue[tuple[int, Any]], count: int) -> AsyncIterator[Event]:
    """Until every call has its completion."""
    event, missing = first, count
    while True:
        yield event
        missing -= isinstance(event[1], Completion)
        if not missing:
            return
        event = await _next(events)
