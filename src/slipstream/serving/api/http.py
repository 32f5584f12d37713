"""What all routes share: JSON answers, errors as OpenAI writes them, and which exception is which status.

400 RequestError, WireError    the request can never succeed; `param` names the field where one is known
401                            admin routes without the run's token
404, 405, 413                  no such route, wrong method, body too large (aiohttp raises these)
409 EngineError, ModelError    the engine refused new weights
429 EngineUnavailable at add   the queue is full, or no version is live yet: try again
503 EngineUnavailable later    a step failed, or the engine is going down
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from slipstream.engine.driver import StepFailed
from slipstream.errors import EngineError, EngineUnavailable, ModelError, RequestError, WireError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Largest request body: 4 M tokens, or a very long conversation. More is answered with 413."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FieldError(RequestError):
    """A request error that knows the field."""

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param = param


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_body(error: Exception) -> dict[str, Any]:
    kind = "invalid_request_error" if isinstance(error, (RequestError, WireError)) else type(error).__name__
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": None}}


def error_response(error: Exception, unavailable_status: int = 503) -> web.Response:
    """The answer to a request that raised. Anything unexpected is logged with its traceback and becomes a 500."""
    if isinstance(error, (RequestError, WireError)):
        status = 400
    elif isinstance(error, EngineUnavailable):
        status = 503 if isinstance(error, StepFailed) else unavailable_status
    elif isinstance(error, (EngineError, ModelError)):
        status = 409
    else:
        log.error("a request failed", exc_info=error)
        status = 500
    return json_response(error_body(error), status)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error of every route is JSON; a bad request never ends the server."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        body = {"error": {"message": _explain(request, error), "type": "invalid_request_error", "param": None, "code": None}}
        return json_response(body, error.status)
    except Exception as error:
        return error_response(error)


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


def _explain(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 404:
        return f"{request.method} {request.path}: no such route; see GET /health, /v1/models, POST /v1/chat/completions, /v1/completions"
    if error.status == 405:
        return f"{request.method} {request.path}: method not allowed here"
    if error.status == 413:
        return f"the body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt"
    return f"{request.method} {request.path}: {error.reason}"
