"""The engine's HTTP application: which routes there are.

    POST /slipstream/generate, /slipstream/stream     slipstream.serving.api.tokens
    GET  /health  /metrics        state for people and probes, Prometheus text
    GET  /v1/models, POST /v1/completions, /v1/chat/completions, /v1/messages     slipstream.serving.api
    POST /admin/...               slipstream.serving.api.admin

One thread runs everything (slipstream.engine.driver).
"""

from __future__ import annotations

from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.engine.driver import EngineDriver
from slipstream.engine.metrics import prometheus_text
from slipstream.serving.api.admin import admin_routes
from slipstream.serving.api.http import MAX_BODY_BYTES, errors_as_json, health_route
from slipstream.serving.api.port import EnginePort
from slipstream.serving.api.routes import api_routes
from slipstream.serving.api.tokens import token_routes


def make_app(driver: EngineDriver, tokenizer: ChatTokenizer, token: str, model_name: str) -> web.Application:
    """All routes. `token` guards the admin routes."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(driver), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
    app.add_routes(token_routes(driver))
    app.add_routes([health_route(driver), web.get("/metrics", metrics)])
    app.add_routes(api_routes(EnginePort(driver, tokenizer, model_name, driver.engine.seq_len)))
    app.add_routes(admin_routes(driver, token))
    return app
