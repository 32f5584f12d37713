"""The HTTP routes of vLLM's server (0.32: token-in token-out, weight transfer, pause, metrics) over its Unix socket.

Knows what they are called and what their errors mean; not when to call them. Must be used from one event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp

from slipstream.errors import EngineError, EngineUnavailable, RequestError
from slipstream.serving.vllm.middleware import ROUTE
from slipstream.transport.threads import off_loop

ASK_TIMEOUT_S, GENERATE_TIMEOUT_S, HEALTH_TIMEOUT_S = 120.0, 3600.0, 5.0
GENERATE = "/inference/v1/generate"
LINE_BYTES = 1 << 22
"""Longest line of a stream: all tokens that were sampled since the last one was read."""
PREFIX = "generate-tokens-"
"""What vLLM puts before the id of a token-in token-out request; aborting needs the whole."""


class Api:
    """One server. Every call raises EngineUnavailable when nobody answers."""

    def __init__(self, socket: Path, load_timeout_s: float = 600.0):
        """`load_timeout_s` (engine.load_timeout_s): of loading weights into the model, and of scoring a prompt right after."""
        self._socket, self._load_timeout_s = socket, load_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /inference/v1/generate. Cancelling closes the connection, upon which vLLM aborts the request. Raises RequestError."""
        return await self._json("POST", GENERATE, body, GENERATE_TIMEOUT_S)

    async def score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """As `generate`, for a prompt whose reply nobody waits for: it takes a step or two."""
        return await self._json("POST", GENERATE, body, self._load_timeout_s)

    async def stream(self, body: Mapping[str, Any], hear: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """As `generate`; `hear` gets the answer in pieces (server-sent events) as they come. No more is read while it waits."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._asked("POST", GENERATE, body, GENERATE_TIMEOUT_S) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):  # what is between events, and [DONE]
                    continue
                piece = json.loads(line[len(b"data: ") :])
                if "error" in piece:
                    raise ServerFailed(f"vLLM: {GENERATE}: {_message(line[len(b'data: ') :])}")
                await hear(piece)

    async def spans(self, request_id: str) -> list[tuple[int, int]]:
        """See middleware. Policy version and first token of each stretch of a running request; none when it has ended."""
        found = await self._json("GET", f"{ROUTE}?{urlencode({'id': PREFIX + request_id})}", None, ASK_TIMEOUT_S)
        return [(int(version), start) for version, start in found["spans"]]

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._send("POST", "/inference/v1/abort_requests", {"request_ids": [PREFIX + name for name in request_ids]})

    async def pause(self, mode: str) -> None:
        """`keep`: running requests stand still. `abort`: they end."""
        await self._send("POST", f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        await self._send("POST", "/resume")

    async def update_weights(self, folder: str, fingerprint: str, version: str) -> None:
        """Load a published version. The server must be paused. Raises LoadFailed."""
        try:
            await self._send("POST", "/start_weight_update")
            info = {"folder": folder, "fingerprint": fingerprint}
            await self._send("POST", "/update_weights", {"update_info": info}, self._load_timeout_s)
            await self._send("POST", "/finish_weight_update", {"weight_version": version}, self._load_timeout_s)
        except ServerFailed as error:
            raise LoadFailed(f"vLLM could not load {folder}: {error}; its log has the traceback") from None

    async def forget_prefixes(self, recompute_running: bool = False) -> None:
        await self._send("POST", f"/reset_prefix_cache?reset_running_requests={str(recompute_running).lower()}")

    async def call_workers(self, method: str, *args: str) -> list[Any]:
        """Answers of the worker extension's method, one a worker."""
        body = {"method": method, "args": list(args), "timeout": ASK_TIMEOUT_S}
        return (await self._json("POST", "/collective_rpc", body, ASK_TIMEOUT_S))["results"]

    async def metrics(self) -> str:
        return (await self._send("GET", "/metrics")).decode()

    async def healthy(self) -> bool:
        try:
            await self._send("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    async def gone(self) -> bool:
        """Whether nobody listens any more, or who listens says that its engine is dead. One that is slow to answer is neither.

        A server that waits for an engine which is dead does not end: it waits for ever.
        """
        try:
            await self._send("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except (Unreachable, ServerFailed):
            return True
        except EngineError:
            pass
        return False

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _json(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        answer = await self._send(method, path, body, timeout_s)
        try:
            return await off_loop(len(answer), lambda: json.loads(answer))
        except ValueError:
            raise EngineUnavailable(f"vLLM: {path}: the answer is not JSON: {answer[:200]!r}") from None

    async def _send(self, method: str, path: str, body: Any = None, timeout_s: float = ASK_TIMEOUT_S) -> bytes:
        async with self._asked(method, path, body, timeout_s) as response:
            return await response.read()

    @asynccontextmanager
    async def _asked(self, method: str, path: str, body: Any, timeout_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 2xx answer, to be read within the block; every other ending is one of our exceptions."""
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=4.0)  # uvicorn closes idle ones after 5 s
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES)
        try:
            async with asyncio.timeout(timeout_s), self._session.request(method, f"http://vllm{path}", json=body) as response:
                if response.status >= 400:
                    text = f"vLLM: {path}: HTTP {response.status}: {_message(await response.read())}"
                    raise RequestError(text) if response.status < 500 else ServerFailed(text)
                yield response
        except TimeoutError:
            raise EngineUnavailable(f"vLLM: {path}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"vLLM: {path}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"vLLM: {path}: {type(error).__name__}: {error}") from None


class LoadFailed(EngineError):
    """The weights are not loaded, or not all of them: the server must not be used before others are."""


class Unreachable(EngineUnavailable):
    """Nobody listens."""


class ServerFailed(EngineUnavailable):
    """HTTP 5xx: the server is there and something in it failed."""


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
