"""What all routes share: JSON answers, errors in the shape of the API that was asked, and which exception is which status.

400 RequestError, WireError    the request can never succeed; `param` names the field where one is known
401, 404, 410 ApiError         no or a wrong key; no such model or session; a session that has ended
404, 405, 413                  no such route, wrong method, body too large (aiohttp raises these)
409 EngineError, ModelError    the engine refused new weights
429 EngineBusy                 the queue is full: try again
503 EngineUnavailable          no version is live yet, a step failed, or the engine is going down
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Protocol

import msgspec
from aiohttp import web

from slipstream.errors import ConfigError, EngineBusy, EngineError, EngineUnavailable, ModelError, RequestError, WireError
from slipstream.types import EngineState

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Largest request body: 4 M tokens, or a very long conversation. More is answered with 413."""

WIRE = "application/x-slipstream"
"""Content type of token-in token-out."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""docs.anthropic.com, API reference, Errors; all other statuses are invalid_request_error."""
_KINDS = {400: "bad_request", 401: "wrong_key", 403: "wrong_key", 404: "not_found", 405: "not_found", 409: "refused", 413: "too_large"}
_KINDS |= {429: "busy", 503: "unavailable"}
ERRORS: web.AppKey[Counter[str]] = web.AppKey("errors", Counter)
"""Requests that failed by kind (a code of ApiError, a word for the status, or 'disconnected'), where an application counts them."""


class ApiError(RequestError):
    """A request error with a status, and with OpenAI's `type`, `param` and `code`."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


class FieldError(ApiError):
    """A request error that knows the field."""

    def __init__(self, param: str, message: str):
        super().__init__(400, f"{param}: {message}", param=param)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


class Healthy(Protocol):
    """An engine that knows how it is."""

    @property
    def ready(self) -> bool: ...
    async def state(self) -> EngineState: ...


def health_route(engine: Healthy) -> web.RouteDef:
    """GET /health: the engine's state; 503 while it can answer nothing."""

    async def health(_: web.Request) -> web.Response:
        status = "ok" if engine.ready else "not ready"
        return json_response({"status": status, **asdict(await engine.state())}, 200 if engine.ready else 503)

    return web.get("/health", health)


def status_of(error: Exception) -> int:
    """Anything that is not ours to raise is a 500."""
    if isinstance(error, ApiError):
        return error.status
    for kinds, status in (
        ((RequestError, WireError), 400),
        (EngineBusy, 429),
        (EngineUnavailable, 503),
        ((EngineError, ModelError), 409),
        (web.HTTPException, getattr(error, "status", 500)),
    ):
        if isinstance(error, kinds):
            return status
    return 500


def error_body(error: Exception, anthropic: bool = False, message: str = "") -> dict[str, Any]:
    """`message` replaces the exception's own."""
    status, text = status_of(error), message or str(error)
    if anthropic:
        return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, "invalid_request_error"), "message": text}}
    wrong = isinstance(error, (RequestError, WireError, web.HTTPException))
    kind = getattr(error, "kind", "invalid_request_error" if wrong else type(error).__name__)
    return {"error": {"message": text, "type": kind, "param": getattr(error, "param", None), "code": getattr(error, "code", None)}}


def is_anthropic(request: web.Request) -> bool:
    return request.path.endswith(("/v1/messages", "/v1/messages/count_tokens"))


def note_error(request: web.Request, error: Exception) -> int:
    """Log what is unexpected, count it where the application counts; its status."""
    status = status_of(error)
    if status == 500:
        log.error("a request failed", exc_info=error)
    _count(request, getattr(error, "code", None) or _KINDS.get(status, "internal"))
    return status


def _count(request: web.Request, kind: str) -> None:
    if (errors := request.app.get(ERRORS)) is not None:
        errors[kind] += 1


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error of every route is JSON; a bad request never ends the server."""
    try:
        return await handler(request)
    except (asyncio.CancelledError, ConnectionError):  # the client went away (or the server ends)
        _count(request, "disconnected")
        raise
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return json_response(error_body(error, is_anthropic(request), _explain(request, error)), note_error(request, error))
    except Exception as error:
        return json_response(error_body(error, is_anthropic(request)), note_error(request, error))


async def read_json(request: web.Request, kind: Any) -> Any:
    """The body as a msgspec type. Raises FieldError naming the field and what is wrong with it; unknown fields are ignored."""
    body = await request.read()
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise FieldError(path.strip("`.") or "body", message + _sent(body, path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError("body", f"not valid JSON ({error}); {len(body)} bytes were sent") from None


def _sent(body: bytes, path: str) -> str:
    """What the client sent at this msgspec path ('.stop[1]'), for the message; empty where the path leads nowhere."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):  # what fits no Python value, such as 1e400
        return ""
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return ""
    text = repr(value)
    return f"; got {text if len(text) <= 80 else text[:80] + '...'}"


async def listen(runner: web.AppRunner, host: str, port: int, section: str) -> str:
    """Its URL. Raises ConfigError naming the keys of `section` when it cannot listen there."""
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        raise _cannot_listen(error, host, port, section) from None
    address = runner.addresses[0]
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{name}:{address[1]}"


async def check_free(host: str, port: int, section: str) -> None:
    """For who listens only after long work. Raises ConfigError as `listen` does."""
    try:
        (await asyncio.start_server(lambda *_: None, host, port)).close()
    except OSError as error:
        raise _cannot_listen(error, host, port, section) from None


def _cannot_listen(error: OSError, host: str, port: int, section: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{section}.port: {host}:{port} is taken; stop what listens there or set another {section}.port (0: a free one)")
    return ConfigError(f"{section}.host = {host!r}, {section}.port = {port}: cannot listen there: {error.strerror or error}")


def _explain(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 404:
        routes = "GET /health, /v1/models, POST /v1/chat/completions, /v1/completions, /v1/messages"
        return f"{request.method} {request.path}: no such route; see {routes}"
    if error.status == 405:
        return f"{request.method} {request.path}: method not allowed here"
    if error.status == 413:
        return f"the body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt"
    return f"{request.method} {request.path}: {error.reason}"
