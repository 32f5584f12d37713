"""The Engine port over HTTP: one engine server, from the caller's side.

Speaks the wire format to POST /slipstream/generate and /slipstream/stream, and JSON to the admin routes. Knows nothing of other replicas,
retries or versions: that is `slipstream.serving.pool`. Must be used from one event loop; connections are opened when they are first needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from slipstream.errors import EngineError, EngineUnavailable, WireError
from slipstream.ports import Hear
from slipstream.serving.bodies import read_body, read_exactly
from slipstream.serving.frames import COMPLETION, HEAD, MAX_FRAME_BYTES, PIECE, error_of, read_error, read_piece
from slipstream.transport.codec import decode_completion, encode_request
from slipstream.transport.threads import off_loop
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion

ASK_TIMEOUT_S = 60.0
"""Deadline of state, abort and the like. The server answers between two engine steps, which take seconds for a large model on a CPU."""
Body = bytes | memoryview
_NO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class HttpEngine:
    """Implements ports.Engine. Every call has a deadline of its own, beside the caller's."""

    def __init__(self, url: str, token: str = "", generate_timeout_s: float = 3600.0, update_timeout_s: float = 600.0):
        """`url` like 'http://127.0.0.1:8000'. `token` is the admin token; generating needs none.

        `update_timeout_s`: of prepare, which reads and hashes all weights, and of commit, which on vLLM loads them and verifies what it
        computes.
        """
        self.url = url.rstrip("/")
        self._generate_url = URL(f"{self.url}/slipstream/generate")  # parsed once
        self._stream_url = URL(f"{self.url}/slipstream/stream")
        self._admin = {"Authorization": f"Bearer {token}"}
        self._generate_timeout_s, self._update_timeout_s = generate_timeout_s, update_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ports.Engine. Cancelling closes the connection, upon which the server aborts the request."""
        body = await self._send("POST", self._generate_url, encode_request(request), {}, self._generate_timeout_s)
        try:
            return await off_loop(len(body), lambda: decode_completion(body))
        except WireError as error:
            raise EngineUnavailable(f"{self.url}: the answer to {request.id} does not decode: {error}") from None

    async def stream(self, request: GenerateRequest, hear: Hear) -> Completion:
        """See ports.StreamingEngine. Cancelling closes the connection, upon which the server aborts the request."""
        where = f"{self._stream_url} ({request.id})"
        try:
            async with (
                asyncio.timeout(self._generate_timeout_s),
                self._connected().post(self._stream_url, data=encode_request(request)) as response,
            ):
                if response.status != 200:
                    raise _error_of("POST", self._stream_url, response.status, await response.read())
                return await _heard(response.content, hear, where)
        except TimeoutError:
            raise EngineUnavailable(f"{where}: no answer within {self._generate_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise EngineUnavailable(f"{where}: {type(error).__name__}: {error}") from None
        except (WireError, KeyError) as error:
            raise EngineUnavailable(f"{where}: the answer does not decode: {error}") from None

    async def prepare(self, version: PolicyVersion) -> None:
        await self._admin_post("prepare", asdict(version), self._update_timeout_s)

    async def commit(self, number: int) -> None:
        await self._admin_post("commit", {"number": number}, self._update_timeout_s)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._admin_post("abort", {"ids": list(request_ids)}, ASK_TIMEOUT_S)

    async def pause(self) -> None:
        """Stop decoding; requests wait. Not part of the port."""
        await self._admin_post("pause", {}, ASK_TIMEOUT_S)

    async def resume(self) -> None:
        await self._admin_post("resume", {}, ASK_TIMEOUT_S)

    async def drain(self, on: bool = True) -> None:
        """Have it tell routers to send nothing new, or to send again. Not part of the port."""
        await self._admin_post("drain" if on else "undrain", {}, ASK_TIMEOUT_S)

    async def state(self) -> EngineState:
        body = await self._send("GET", f"{self.url}/admin/state", None, self._admin, ASK_TIMEOUT_S)
        return msgspec.json.decode(body, type=EngineState)

    async def close(self) -> None:
        """Close the connections. Idempotent; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _admin_post(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        await self._send("POST", f"{self.url}/admin/{name}", msgspec.json.encode(body), self._admin, timeout_s)

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = _open_session()
        return self._session

    async def _send(self, method: str, url: str | URL, body: bytes | None, headers: dict[str, str], timeout_s: float) -> Body:
        """The body of a 200 answer; every other ending is one of our exceptions."""
        try:
            async with asyncio.timeout(timeout_s), self._connected().request(method, url, data=body, headers=headers) as response:
                answer = await read_body(response)
        except TimeoutError:
            raise EngineUnavailable(f"{method} {url}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{method} {url}: {type(error).__name__}: {error}") from None
        if response.status != 200:
            raise _error_of(method, url, response.status, answer)
        return answer


def _open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NO_HEADERS,
        auto_decompress=False,
    )


async def _heard(body: aiohttp.StreamReader, hear: Hear, where: str) -> Completion:
    """Reads frames up to the completion. Raises what an error frame stands for; IncompleteReadError where the body ends too early."""
    while True:
        kind, size = HEAD.unpack(await read_exactly(body, HEAD.size))
        if size > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {size} bytes")
        frame = await read_exactly(body, size)
        if kind == PIECE:
            hear(read_piece(frame))
        elif kind == COMPLETION:
            return await off_loop(size, partial(decode_completion, frame))
        else:
            raise read_error(frame, where)


def _error_of(method: str, url: str | URL, status: int, body: Body) -> EngineError:
    """The exception that an answer with this status stands for."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = bytes(body[:200]).decode(errors="replace")
    return error_of(status, f"{method} {url}: HTTP {status}: {message}")
