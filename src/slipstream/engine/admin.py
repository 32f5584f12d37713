"""Routes that change the engine: weights, pause, abort. They need the token that the server made at its start.

Knows HTTP and the driver; what a version is and how it is loaded is the engine's business.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec
from aiohttp import web

from slipstream.engine.driver import EngineDriver
from slipstream.serving.api.http import ApiError, Handler, json_response, read_json
from slipstream.types import PolicyVersion

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


def admin_routes(driver: EngineDriver, token: str) -> list[web.RouteDef]:
    """POST /admin/{prepare,commit,abort,pause,resume,drain,undrain} and GET /admin/state; each answers with the engine's state."""

    async def state(_: web.Request) -> web.Response:
        return json_response(await driver.state())

    async def prepare(request: web.Request) -> web.Response:
        body = await read_json(request, PrepareBody)
        await driver.prepare(PolicyVersion(body.number, body.fingerprint, body.parent, body.path))
        return await state(request)

    async def commit(request: web.Request) -> web.Response:
        await driver.commit((await read_json(request, CommitBody)).number)
        return await state(request)

    async def abort(request: web.Request) -> web.Response:
        await driver.abort((await read_json(request, AbortBody)).ids)
        return await state(request)

    async def pause(request: web.Request) -> web.Response:
        driver.pause()
        return await state(request)

    async def resume(request: web.Request) -> web.Response:
        driver.resume()
        return await state(request)

    async def drain(request: web.Request) -> web.Response:
        driver.draining = True
        return await state(request)

    async def undrain(request: web.Request) -> web.Response:
        driver.draining = False
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
