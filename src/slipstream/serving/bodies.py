"""HTTP bodies of any size without standing in the loop's way: a long rollout's answer carries tens of megabytes of routing rows.

asyncio keeps what a socket does not take at once, and moves it for every piece that leaves: so a large body is handed over in pieces, each
when the one before has gone. Reading fills one buffer instead of joining thousands of pieces at the end. Its memory is there before it is
filled: pages that came meanwhile would come on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from aiohttp import ClientResponse, StreamReader, web

from slipstream.transport.buffers import room
from slipstream.transport.threads import off_loop

PIECE_BYTES = 1 << 18


async def send_body(request: web.Request, pieces: Sequence[bytes | memoryview], content_type: str) -> web.StreamResponse:
    """Answer with 200 and these pieces, end to end."""
    size = sum(map(len, pieces))
    if size <= PIECE_BYTES:
        return web.Response(body=b"".join(pieces), content_type=content_type)
    response = web.StreamResponse(headers={"Content-Type": content_type})
    response.content_length = size
    await response.prepare(request)
    await write_pieces(response, pieces)
    await response.write_eof()
    return response


async def write_pieces(response: web.StreamResponse, pieces: Sequence[bytes | memoryview]) -> None:
    """Each when the one before has gone."""
    for piece in map(memoryview, pieces):
        for start in range(0, len(piece), PIECE_BYTES):
            await response.write(piece[start : start + PIECE_BYTES])
            await asyncio.sleep(0)  # a fast reader takes every piece at once, and `write` never waits


async def read_body(response: ClientResponse) -> bytes | memoryview:
    """The whole body. Raises aiohttp.ClientPayloadError when the connection ends before it does."""
    size = response.content_length
    if size is None or size <= PIECE_BYTES:
        return await response.read()
    return await read_exactly(response.content, size)


async def read_exactly(body: StreamReader, size: int) -> bytes | memoryview:
    """The next `size` bytes of a body. Raises IncompleteReadError when it ends before."""
    if size <= PIECE_BYTES:
        return await body.readexactly(size)
    buffer = await off_loop(size, partial(room, size))
    filled = 0
    while filled < size:
        piece = await body.read(size - filled)
        if not piece:
            raise asyncio.IncompleteReadError(b"", size - filled)
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
    return buffer
