"""HTTP/1.1 as the engine server speaks it, from the caller's side: one request at a time on a connection that is kept.

A run makes thousands of small requests a minute beside everything else that the orchestrator does, and a general client spends more
on each than all of our own code. This one knows what it will get: a status line, headers with a Content-Length, and that many bytes.
Anything else is a ProtocolError. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
MAX_HEAD_BYTES = 65536

Answer = tuple[int, bytes]
"""Status and body."""


class ProtocolError(OSError):
    """The other side does not speak HTTP as expected, or left in the middle of an answer."""


class HttpClient:
    """Connections to one server, opened when they are needed, any number at once. For one event loop."""

    def __init__(self, url: str):
        """`url` like 'http://127.0.0.1:8000'."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._netloc = parts.netloc
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> Answer:
        """The answer to one request. `headers`: lines that end with CRLF. Cancelling closes the connection.

        Raises OSError: nobody listens, or the connection ends before the answer does.
        """
        connection = await self._connection()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._netloc}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        try:
            answer = await connection.ask(head.encode("latin-1") + body)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close every connection; requests in flight fail."""
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()  # the last one used: the others may age and be closed by the server
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: _Connection(self._open), self._host, self._port)
        except TimeoutError:
            raise ProtocolError(f"no connection to {self._netloc} within {CONNECT_TIMEOUT_S:g} s") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection: `ask` sends a request and gives the answer to it."""

    def __init__(self, members: set[_Connection]):
        self._members = members
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._answer: asyncio.Future[Answer] | None = None
        self.usable = False
        """Whether another request may be sent."""

    async def ask(self, message: bytes) -> Answer:
        assert self._transport is not None and self._answer is None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            return await self._answer
        finally:
            self._answer = None

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the event loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport, self.usable = transport, True
        self._members.add(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            parsed = _parse(self._received)
        except ValueError as error:
            self._fail(ProtocolError(f"no answer that HTTP allows: {error}"))
            return
        if parsed is None:
            return
        answer, keep = parsed
        self._received.clear()
        if not keep:
            self.close()
        if self._answer is None:
            self.close()  # an answer that nobody asked for
        elif not self._answer.done():
            self._answer.set_result(answer)

    def eof_received(self) -> None:
        self.usable = False  # nobody may take it between here and connection_lost

    def connection_lost(self, exc: Exception | None) -> None:
        self._members.discard(self)
        self._fail(exc or ProtocolError("the connection was closed before the answer was complete"))

    def _fail(self, error: Exception) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _parse(received: bytearray) -> tuple[Answer, bool] | None:
    """The answer and whether the connection stays open; None while it is incomplete. Raises ValueError: it is not one."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        if len(received) > MAX_HEAD_BYTES or not received.startswith(b"HTTP/1.1 "[: len(received)]):
            raise ValueError(bytes(received[:80]))
        return None
    status_line, *lines = bytes(received[:end]).split(b"\r\n")
    version, status, *_ = status_line.split(b" ", 2)
    if version != b"HTTP/1.1":
        raise ValueError(bytes(status_line[:80]))
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    try:
        length = int(headers[b"content-length"])
    except KeyError:
        raise ValueError("it has no Content-Length") from None
    start, extra = end + 4, len(received) - end - 4 - length
    if extra > 0:
        raise ValueError(f"{extra} bytes too many after a body of {length}")
    if extra < 0:
        return None
    return (int(status), bytes(received[start:])), headers.get(b"connection", b"").lower() != b"close"
