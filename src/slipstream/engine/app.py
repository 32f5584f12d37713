"""The engine's HTTP application: which routes there are, and the two that are neither OpenAI's nor admin.

    POST /slipstream/generate     wire-format request in, wire-format completion out; disconnecting aborts it
    GET  /health  /metrics        state for people and probes, Prometheus text
    GET  /v1/models, POST /v1/completions, /v1/chat/completions     slipstream.engine.openai_api
    POST /admin/...               slipstream.engine.admin

One thread runs everything (slipstream.engine.driver). The generate route has no JSON, no log line and no middleware work.
"""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.engine.admin import admin_routes
from slipstream.engine.driver import EngineDriver
from slipstream.engine.http import MAX_BODY_BYTES, error_response, errors_as_json, json_response
from slipstream.engine.metrics import prometheus_text
from slipstream.engine.openai_api import openai_routes
from slipstream.errors import EngineUnavailable, RequestError, WireError
from slipstream.serving.bodies import send_body
from slipstream.transport.codec import decode_request, encode_completion
from slipstream.transport.threads import off_loop
from slipstream.types import GenerateRequest

WIRE = "application/x-slipstream"


def make_app(driver: EngineDriver, tokenizer: ChatTokenizer, token: str, model_name: str) -> web.Application:
    """All routes. `token` guards the admin routes."""

    async def generate(request: web.Request) -> web.StreamResponse:
        call = _decode(await request.read())
        try:
            completion = await driver.generate(call)
        except EngineUnavailable as error:
            return error_response(error, 429 if driver.ready else 503)
        size = completion.routing.ids_TLK.nbytes if completion.routing is not None else 0
        return await send_body(request, await off_loop(size, lambda: encode_completion(completion)), WIRE)

    async def health(_: web.Request) -> web.Response:
        status = "ok" if driver.ready else "not ready"
        return json_response({"status": status, **asdict(await driver.state())}, 200 if driver.ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(driver), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/slipstream/generate", generate), web.get("/health", health), web.get("/metrics", metrics)])
    app.add_routes(openai_routes(driver, tokenizer, model_name))
    app.add_routes(admin_routes(driver, token))
    return app


def _decode(body: bytes) -> GenerateRequest:
    """Raises WireError or RequestError; what a newer or broken client leaves out or adds is named, not guessed."""
    try:
        call = decode_request(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError(f"generate_request: field {error} does not fit; use the same slipstream version on both sides") from None
    _check(call)
    return call


def _check(call: GenerateRequest) -> None:
    sampling = call.sampling
    for name, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p), ("min_p", sampling.min_p)):
        if not isinstance(value, (int, float)):
            raise RequestError(f"sampling.{name} = {value!r}: expected a number")
    for name, value in (
        ("top_k", sampling.top_k),
        ("max_tokens", sampling.max_tokens),
        ("salt", call.salt),
        ("routing_from", call.routing_from),
    ):
        if not isinstance(value, int):
            raise RequestError(f"{name} = {value!r}: expected an integer")
    if not isinstance(sampling.seed, int | None):
        raise RequestError(f"sampling.seed = {sampling.seed!r}: expected an integer or nothing")
    if not all(isinstance(text, str) for text in sampling.stop) or not all(isinstance(i, int) for i in sampling.stop_token_ids):
        raise RequestError(f"sampling.stop = {sampling.stop!r}, stop_token_ids = {sampling.stop_token_ids!r}: expected texts, and integers")
    if not isinstance(call.id, str) or not call.id:
        raise RequestError(f"id = {call.id!r}: expected a non-empty string")
    if call.prompt_T.ndim != 1 or call.prompt_T.dtype.name != "int32":
        raise RequestError(f"prompt: {call.prompt_T.dtype} array of shape {call.prompt_T.shape}; expected int32 token ids in one dimension")
