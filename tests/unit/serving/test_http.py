"""The HTTP client of the engine pool, against servers that answer byte by byte what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from slipstream.serving.http import HttpClient, ProtocolError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Served:
    """What a server saw."""

    def __init__(self, client: HttpClient):
        self.client = client
        self.connections = 0
        self.requests: list[bytes] = []
        self.left = asyncio.Event()
        """A client closed its connection."""


@asynccontextmanager
async def serve(answer: Callable[[int], bytes | None], bytewise: bool = False, hang_up: bool = False) -> AsyncIterator[Served]:
    """Answers request n with `answer(n)`; None: never. `hang_up`: closes after each answer without saying so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                served.requests.append(head + await reader.readexactly(length))
                reply = answer(len(served.requests) - 1)
                if reply is None:
                    await reader.read()
                    return
                for piece in [reply[i : i + 1] for i in range(len(reply))] if bytewise else [reply]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if hang_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            served.left.set()
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    served = Served(HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    async with server, asyncio.timeout(10):
        yield served
        served.client.close()


async def test_a_request_is_sent_as_http_and_its_connection_is_used_again():
    async with serve(lambda n: OK) as served:
        assert await served.client.ask("POST", "/a", b"body", "X-Key: v\r\n") == (200, b"hi")
        assert await served.client.ask("GET", "/b") == (200, b"hi")
    host = served.requests[0].split(b"Host: ")[1].split(b"\r\n")[0]
    assert served.requests[0] == b"POST /a HTTP/1.1\r\nHost: " + host + b"\r\nX-Key: v\r\nContent-Length: 4\r\n\r\nbody"
    assert served.connections == 1


async def test_an_answer_may_come_in_any_pieces():
    async with serve(lambda n: OK, bytewise=True) as served:
        assert [await served.client.ask("GET", "/") for _ in range(2)] == [(200, b"hi")] * 2


async def test_requests_at_once_have_connections_of_their_own():
    async with serve(lambda n: OK, bytewise=True) as served:
        assert await asyncio.gather(*(served.client.ask("GET", "/") for _ in range(5))) == [(200, b"hi")] * 5
        assert served.connections == 5
        await served.client.ask("GET", "/")
        assert served.connections == 5


async def test_other_statuses_come_with_their_body_and_header_names_in_any_case():
    async with serve(lambda n: b"HTTP/1.1 503 Service Unavailable\r\ncontent-LENGTH: 3\r\n\r\nno!") as served:
        assert await served.client.ask("GET", "/") == (503, b"no!")


@pytest.mark.parametrize("hang_up", [True, False], ids=["without a word", "as announced"])
async def test_a_connection_that_the_server_closed_is_not_used_again(hang_up):
    reply = OK if hang_up else OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with serve(lambda n: reply, hang_up=hang_up) as served:
        for _ in range(3):
            assert await served.client.ask("GET", "/") == (200, b"hi")
            await served.left.wait()
            await asyncio.sleep(0.01)
        assert served.connections == 3


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", "HTTP/1.0"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "no Content-Length"),
        (OK + b"more", "4 bytes too many"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nhi", "invalid literal"),
    ],
)
async def test_what_is_not_an_answer_is_an_error_and_the_connection_ends(reply, said):
    async with serve(lambda n: reply if n == 0 else OK) as served:
        with pytest.raises(ProtocolError, match=said):
            await served.client.ask("GET", "/")
        await served.left.wait()
        assert await served.client.ask("GET", "/") == (200, b"hi")
        assert served.connections == 2


async def test_a_server_that_leaves_in_the_middle_is_an_error():
    async with serve(lambda n: OK[:-1], hang_up=True) as served:
        with pytest.raises(OSError, match="before the answer was complete"):
            await served.client.ask("GET", "/")


async def test_cancelling_closes_the_connection_so_that_the_server_knows():
    async with serve(lambda n: None if n == 0 else OK) as served:
        call = asyncio.create_task(served.client.ask("GET", "/"))
        while not served.requests:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        await asyncio.wait_for(served.left.wait(), 5)
        assert await served.client.ask("GET", "/") == (200, b"hi")


async def test_closing_the_client_fails_what_is_in_flight_and_a_later_request_connects_anew():
    async with serve(lambda n: None if n == 0 else OK) as served:
        call = asyncio.create_task(served.client.ask("GET", "/"))
        while not served.requests:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0)
        served.client.close()
        with pytest.raises(OSError):
            await call
        assert await served.client.ask("GET", "/") == (200, b"hi")


async def test_nobody_there_is_an_error():
    with pytest.raises(OSError):
        await HttpClient("http://127.0.0.1:9").ask("GET", "/")


async def test_a_large_answer_arrives_whole():
    body = bytes(range(256)) * 20_000
    async with serve(lambda n: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as served:
        assert await served.client.ask("GET", "/") == (200, body)
