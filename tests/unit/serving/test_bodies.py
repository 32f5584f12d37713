"""Bodies of any size arrive whole, and one that is cut short is an error and not a shorter body."""

from __future__ import annotations

import threading

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slipstream.serving import bodies
from slipstream.serving.bodies import PIECE_BYTES, read_body, send_body
from slipstream.transport.buffers import room
from slipstream.transport.threads import LARGE_BYTES


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 17])
async def test_a_body_of_any_size_arrives_as_it_was(size):
    body = np.random.default_rng(size).bytes(size)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_body(request, [body[: size // 3], memoryview(body)[size // 3 :]], "application/x-slipstream")

    async with _client(answer) as client, client.get("/") as response:
        assert bytes(await read_body(response)) == body
        assert response.content_type == "application/x-slipstream"


async def test_the_memory_of_a_large_body_comes_in_a_worker_and_is_not_that_of_one_still_in_use(monkeypatch):
    threads = []

    def seen(size: int) -> memoryview:
        threads.append(threading.current_thread())
        return room(size)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_body(request, [request.query["text"].encode() * LARGE_BYTES], "application/x-slipstream")

    async def read(text: str) -> np.ndarray:
        async with client.get("/", params={"text": text}) as response:
            return np.frombuffer(await read_body(response), np.uint8)

    monkeypatch.setattr(bodies, "room", seen)
    async with _client(answer) as client:
        first = await read("a")
        second = await read("b")
    assert (first == ord("a")).all()
    assert (second == ord("b")).all()
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_a_body_that_ends_early_is_an_error():
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 4 * PIECE_BYTES
        await response.prepare(request)
        await response.write(b"x" * 2 * PIECE_BYTES)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with _client(answer) as client, client.get("/") as response:
        with pytest.raises(aiohttp.ClientError):
            await read_body(response)


def _client(answer) -> TestClient:
    app = web.Application()
    app.router.add_get("/", answer)
    return TestClient(TestServer(app))
