"""The gateway's HTTP application.

    /v1/...  and  /sessions/ID/v1/...     the APIs of serving.api, for whoever `Gateway.caller` says the request is of
    POST   /sessions                      open one: {"id", "salt", "sampling", "max_turns", "max_rollout_tokens"}, all optional
    GET    /sessions/ID                   what it has done so far
    DELETE /sessions/ID                   end it; its turns as tokens (gateway.wire)
    GET    /health  /metrics              no key needed

The routes on sessions need the gateway's token.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.chat.recording import Limits
from slipstream.errors import EngineUnavailable
from slipstream.observe import registry
from slipstream.serving.api.answer import STREAMS
from slipstream.serving.api.http import ERRORS, MAX_BODY_BYTES, WIRE, errors_as_json, json_response, listen, read_json
from slipstream.serving.api.routes import api_routes
from slipstream.serving.bodies import send_body
from slipstream.serving.gateway.gateway import Gateway
from slipstream.serving.gateway.session import Session
from slipstream.serving.gateway.wire import encode_turns
from slipstream.transport.threads import off_loop
from slipstream.types import Sampling

HEALTH_TIMEOUT_S = 2.0
SHUTDOWN_S = 2.0
"""Time for answers that are on their way at the end."""


class SamplingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A session's contract."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(ge=1)] = 2**31 - 1
    stop: tuple[str, ...] = ()


class OpenBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /sessions"""

    id: str | None = None
    salt: Annotated[int, Meta(ge=0)] = 0
    sampling: SamplingBody | None = None
    max_turns: Annotated[int, Meta(ge=1)] | None = None
    max_rollout_tokens: Annotated[int, Meta(ge=1)] | None = None


def make_app(gateway: Gateway, turn_timeout_s: float) -> web.Application:
    """All routes. `turn_timeout_s`: deadline of a call in a session that is opened here."""

    async def open_session(request: web.Request) -> web.Response:
        gateway.admit(request)
        body: OpenBody = await read_json(request, OpenBody)
        contract = None if body.sampling is None else Sampling(**msgspec.structs.asdict(body.sampling))
        limits = Limits(gateway.seq_len, turn_timeout_s, body.max_turns, body.max_rollout_tokens)
        session = gateway.open_ad_hoc(body.id or secrets.token_hex(8), body.salt, contract, limits)
        return json_response({"id": session.id, "base_url": session.base_url, "api_key": session.api_key, "model": session.model})

    async def look(request: web.Request) -> web.Response:
        gateway.admit(request)
        return json_response(_summary(gateway.named(request.match_info["session"])))

    async def end(request: web.Request) -> web.StreamResponse:
        gateway.admit(request)
        session = gateway.named(request.match_info["session"])
        gateway.end(session.id)
        routing = (turn.completion.routing for turn in session.turns)
        size = sum(rows.ids_TLK.nbytes for rows in routing if rows is not None)
        return await send_body(request, await off_loop(size, lambda: encode_turns(session.turns)), WIRE)

    async def health(_: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                state = await gateway.engine.state()
        except (EngineUnavailable, TimeoutError) as error:
            why = str(error) or f"none was ready within {HEALTH_TIMEOUT_S:g} s; the log says why"
            return json_response({"status": "no engine", "error": why}, 503)
        ready = state.live_version >= 0
        body = {
            "status": "ok" if ready else "not ready",
            "model": gateway.model,
            "sessions": len(gateway.sessions),
            "engine": asdict(state),
        }
        return json_response(body, 200 if ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        own = CollectorRegistry()
        own.register(_Values(gateway))
        return web.Response(body=generate_latest(own), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
    app[ERRORS] = gateway.counts.errors
    app[STREAMS] = gateway.counts.streams
    app.add_routes([*api_routes(gateway), *api_routes(gateway, "/sessions/{session}")])
    app.add_routes([web.post("/sessions", open_session), web.get("/sessions/{session}", look), web.delete("/sessions/{session}", end)])
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics)])
    return app


@asynccontextmanager
async def serving(gateway: Gateway, host: str, port: int, turn_timeout_s: float) -> AsyncIterator[str]:
    """The server while the block runs: its URL, which the gateway knows too. Raises ConfigError when the port is taken."""
    app = make_app(gateway, turn_timeout_s)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=3600, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        gateway.url = await listen(runner, host, port, "gateway")
        yield gateway.url
    finally:
        for session_id in list(gateway.sessions):
            gateway.end(session_id)
        await runner.cleanup()


def _summary(session: Session) -> dict[str, object]:
    return {
        "id": session.id,
        "turns": len(session.turns),
        "sampled_tokens": sum(len(turn.completion.tokens_N) for turn in session.turns),
        "forks": dict(session.forks),
        "running": len(session.running),
        "truncated": session.truncated,
        "failure": None if session.failure is None else str(session.failure),
        "messages": session.messages,
    }


class _Values(Collector):
    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        for key, value in self._gateway.metrics().items():
            found = registry.find(key)
            yield GaugeMetricFamily("slipstream_" + key.replace("/", "_"), found.definition if found else key, value=value)
