"""Routes that change an engine: weights, pause, abort, drain. They need the token that the server made at its start.

Knows HTTP; what a version is and how it is loaded is the engine's business.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Sequence
from typing import Annotated, Protocol

import msgspec
from aiohttp import web

from slipstream.serving.api.http import ApiError, Handler, json_response, read_json
from slipstream.types import EngineState, PolicyVersion

_UNAUTHORIZED = (
    "this route needs the header 'Authorization: Bearer TOKEN' with the admin token, which a stand-alone engine prints at its start and a "
    "run's engine writes to endpoints/engine-N.json"
)
Number = Annotated[int, msgspec.Meta(ge=0)]


class PrepareBody(msgspec.Struct):
    number: Number
    fingerprint: str
    path: str
    parent: int | None = None


class CommitBody(msgspec.Struct):
    number: Number


class AbortBody(msgspec.Struct):
    ids: list[str]


class Managed(Protocol):
    """An engine as these routes need it: ports.Engine, and what only its server can do."""

    draining: bool
    """What it says to routers: that it should get no new requests."""

    async def prepare(self, version: PolicyVersion) -> None: ...
    async def commit(self, number: int) -> None: ...
    async def abort(self, request_ids: Sequence[str]) -> None: ...
    async def state(self) -> EngineState: ...
    def pause(self) -> Awaitable[None] | None:
        """Stop decoding; requests wait. At once, or when what is returned is done."""
        ...

    def resume(self) -> Awaitable[None] | None: ...


def admin_routes(engine: Managed, token: str) -> list[web.RouteDef]:
    """POST /admin/{prepare,commit,abort,pause,resume,drain,undrain} and GET /admin/state; each answers with the engine's state."""

    async def state(_: web.Request) -> web.Response:
        return json_response(await engine.state())

    async def prepare(request: web.Request) -> web.Response:
        body = await read_json(request, PrepareBody)
        await engine.prepare(PolicyVersion(body.number, body.fingerprint, body.parent, body.path))
        return await state(request)

    async def commit(request: web.Request) -> web.Response:
        await engine.commit((await read_json(request, CommitBody)).number)
        return await state(request)

    async def abort(request: web.Request) -> web.Response:
        await engine.abort((await read_json(request, AbortBody)).ids)
        return await state(request)

    async def pause(request: web.Request) -> web.Response:
        if (pausing := engine.pause()) is not None:
            await pausing
        return await state(request)

    async def resume(request: web.Request) -> web.Response:
        if (resuming := engine.resume()) is not None:
            await resuming
        return await state(request)

    async def drain(request: web.Request) -> web.Response:
        engine.draining = True
        return await state(request)

    async def undrain(request: web.Request) -> web.Response:
        engine.draining = False
        return await state(request)

    def guarded(handler: Handler) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not secrets.compare_digest(sent, f"Bearer {token}".encode()):
                raise ApiError(401, _UNAUTHORIZED, "authentication_error")
            return await handler(request)

        return checked

    posts = {"prepare": prepare, "commit": commit, "abort": abort, "pause": pause, "resume": resume, "drain": drain, "undrain": undrain}
    return [web.get("/admin/state", guarded(state)), *(web.post(f"/admin/{name}", guarded(f)) for name, f in posts.items())]
