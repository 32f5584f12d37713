"""The routes of an engine server over the vLLM adapter, so that pool, router and gateway see one kind of engine.

    POST /slipstream/generate     wire-format request in, wire-format completion out; disconnecting aborts it
    GET  /health  /metrics        state; Prometheus text of vLLM, and ours
    POST /admin/{prepare,commit,abort,pause,resume}, GET /admin/state     with the token of the run

Statuses as in docs/engine.md.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from slipstream.errors import EngineBusy, EngineError, EngineUnavailable, RequestError, WireError
from slipstream.serving.bodies import send_body
from slipstream.serving.vllm.engine import VllmEngine
from slipstream.transport.codec import decode_request, encode_completion
from slipstream.transport.threads import off_loop
from slipstream.types import PolicyVersion

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
WIRE = "application/x-slipstream"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Commit(msgspec.Struct):
    number: int


class Abort(msgspec.Struct):
    ids: list[str]


class Prepare(msgspec.Struct):
    number: int
    fingerprint: str
    path: str
    parent: int | None = None


def make_app(engine: VllmEngine, token: str, metrics_text: Callable[[], Awaitable[str]]) -> web.Application:
    """`token` guards the admin routes."""

    async def generate(request: web.Request) -> web.StreamResponse:
        try:
            call = decode_request(await request.read())
        except (KeyError, TypeError, AttributeError) as error:
            raise WireError(f"generate_request: field {error} does not fit; use the same slipstream version on both sides") from None
        done = await engine.generate(call)
        size = done.routing.ids_TLK.nbytes if done.routing is not None else 0
        return await send_body(request, await off_loop(size, lambda: encode_completion(done)), WIRE)

    async def health(_: web.Request) -> web.Response:
        status = "ok" if engine.ready else "not ready"
        return _json({"status": status, **asdict(await engine.state())}, 200 if engine.ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=await metrics_text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/slipstream/generate", generate), web.get("/health", health), web.get("/metrics", metrics)])
    app.add_routes(_admin_routes(engine, token))
    return app


def _admin_routes(engine: VllmEngine, token: str) -> list[web.RouteDef]:
    async def prepare(body: bytes) -> None:
        asked = msgspec.json.decode(body, type=Prepare)
        await engine.prepare(PolicyVersion(asked.number, asked.fingerprint, asked.parent, asked.path))

    async def commit(body: bytes) -> None:
        await engine.commit(msgspec.json.decode(body, type=Commit).number)

    async def abort(body: bytes) -> None:
        await engine.abort(msgspec.json.decode(body, type=Abort).ids)

    def guarded(act: Callable[[bytes], Awaitable[None]] | None) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not secrets.compare_digest(sent, f"Bearer {token}".encode()):
                raise web.HTTPUnauthorized(reason="admin routes need the token in endpoints/engine-N.json")
            if act is not None:
                await act(await request.read())
            return _json(await engine.state())

        return handle

    posts = {"prepare": prepare, "commit": commit, "abort": abort, "pause": lambda _: engine.pause(), "resume": lambda _: engine.resume()}
    return [web.get("/admin/state", guarded(None)), *(web.post(f"/admin/{name}", guarded(act)) for name, act in posts.items())]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON with the status that stands for it."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _problem(error.status, f"{request.method} {request.path}: {error.reason}")
    except (RequestError, WireError, msgspec.DecodeError) as error:
        return _problem(400, str(error))
    except EngineBusy as error:
        return _problem(429, str(error))
    except EngineUnavailable as error:
        return _problem(503, str(error))
    except EngineError as error:
        return _problem(409, str(error))
    except Exception as error:
        log.exception("a request failed")
        return _problem(500, f"{type(error).__name__}: {error}")


def _problem(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": "error", "param": None, "code": None}}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
