"""The routes of an engine server over the vLLM adapter, so that pool, router and gateway see one kind of engine.

POST /slipstream/generate, /slipstream/stream     slipstream.serving.api.tokens
GET  /health  /metrics                            state; Prometheus text of vLLM, and ours
POST /admin/...                                   slipstream.serving.api.admin
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from slipstream.serving.api.admin import admin_routes
from slipstream.serving.api.http import MAX_BODY_BYTES, errors_as_json, health_route
from slipstream.serving.api.tokens import token_routes
from slipstream.serving.vllm.engine import VllmEngine


def make_app(engine: VllmEngine, token: str, metrics_text: Callable[[], Awaitable[str]]) -> web.Application:
    """`token` guards the admin routes."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=await metrics_text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
    app.add_routes([health_route(engine), web.get("/metrics", metrics)])
    app.add_routes([*token_routes(engine), *admin_routes(engine, token)])
    return app
