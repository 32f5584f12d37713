"""A server with the routes of vLLM 0.32 that the adapter uses, scripted: what it "computes" is a number that loading sets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from slipstream.serving.vllm.api import Api
from slipstream.serving.vllm.engine import Limits, VllmEngine
from slipstream.serving.vllm.middleware import ROUTE
from slipstream.serving.vllm.updates import Canary
from slipstream.types import GenerateRequest, Sampling

LIMITS = Limits(seq_len=32, vocab_size=50, stop_ids=frozenset({0}), in_flight=4)
PROMPT = np.array([5, 6, 7], np.int32)


class StubVllm:
    """Logprobs are `-level`; loading folder "w3" makes the level 3. `spoil` folders load as level 9, as a broken reload would."""

    def __init__(self) -> None:
        self.level, self.version = 0.5, "default"
        self.spoil: set[str] = set()
        self.fail: set[str] = set()
        self.drop: set[str] = set()
        """Loading these breaks the connection."""
        self.scored = 0
        """Prompts."""
        self.fails_at = -1
        """The token at which a stream fails."""
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.go = asyncio.Event()
        """Replies of ordinary requests wait for it."""
        self.go.set()
        self.canary_go = asyncio.Event()
        self.canary_go.set()
        self.aborted: dict[str, asyncio.Event] = {}
        self.spans: dict[str, list[list[Any]]] = {}
        """Of requests that are streamed: [version, first token]."""
        self.health, self.health_go = 200, asyncio.Event()
        self.health_go.set()
        self.no_spans = False
        """The server has no such route, as another vLLM might."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = body["request_id"]
        if "prompt_logprobs" in body["sampling_params"]:
            self.scored += 1
            await self.canary_go.wait()
            rows = [None, *({str(t): {"logprob": -self.level}} for t in body["token_ids"][1:])]
            return web.json_response({"prompt_logprobs": rows})
        self.bodies.append(body)
        if body.get("stream"):
            return await self.stream(request, name, body["sampling_params"]["max_tokens"])
        aborted = self.aborted[name] = asyncio.Event()
        waits = [asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(aborted.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        count = min(2, body["sampling_params"]["max_tokens"])
        content = [{"token_id": 3, "logprob": -self.level}] * count
        choice = {
            "token_ids": [3] * count,
            "logprobs": {"content": content},
            "finish_reason": "abort" if aborted.is_set() else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}})

    async def stream(self, request: web.Request, name: str, count: int) -> web.StreamResponse:
        """Server-sent events as vLLM writes them: one a token, the last says how it ended, then usage. All but the first wait for `go`."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        spans = self.spans[f"generate-tokens-{name}"] = []
        for n in range(count):
            if n:
                await self.go.wait()
            if not spans or spans[-1][0] != self.version:
                spans.append([self.version, n])
            content = [{"token_id": 3 + n, "logprob": -self.level}]
            choice = {"index": 0, "token_ids": [3 + n], "logprobs": {"content": content}, "finish_reason": None, "weight_versions": None}
            if n == self.fails_at:
                await response.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\ndata: [DONE]\n\n')
                return response
            if n == count - 1:
                ends = [*(start for _, start in spans[1:]), count]
                found = [{"version": version, "start": start, "end": end} for (version, start), end in zip(spans, ends, strict=True)]
                choice |= {"finish_reason": "length", "weight_versions": found}
            await response.write(f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n".encode())
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def say_spans(self, request: web.Request) -> web.Response:
        if self.no_spans:
            return web.json_response({"error": {"message": "no attribute"}}, status=500)
        return web.json_response({"spans": self.spans.get(request.query["id"], [])})

    async def update_weights(self, request: web.Request) -> web.Response:
        folder = (await request.json())["update_info"]["folder"]
        self.calls.append(f"load {folder}")
        if folder in self.drop:
            assert request.transport is not None
            request.transport.abort()
        if folder in self.fail:
            return web.json_response({"error": {"message": "no such tensor"}}, status=500)
        self.level = 9.0 if folder in self.spoil else float(folder.removeprefix("w"))
        return web.json_response({})

    async def finish(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return web.json_response({})

    async def abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            if (found := self.aborted.get(name.removeprefix("generate-tokens-"))) is not None:
                found.set()
        return web.Response()

    async def note(self, request: web.Request) -> web.Response:
        self.calls.append(f"{request.path[1:]} {request.query_string}".split("&")[0].strip())
        return web.json_response({})

    async def say_health(self, _: web.Request) -> web.Response:
        await self.health_go.wait()
        return web.Response(status=self.health)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text='vllm:generation_tokens_total{engine="0"} 7.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n')

    def app(self) -> web.Application:
        app = web.Application()
        posts = {
            "/inference/v1/generate": self.generate,
            "/inference/v1/abort_requests": self.abort,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish,
            **dict.fromkeys(("/pause", "/resume", "/start_weight_update", "/reset_prefix_cache"), self.note),
        }
        app.add_routes([web.get("/health", self.say_health), web.get("/metrics", self.metrics), web.get(ROUTE, self.say_spans)])
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        return app


def reference(folder: str, prompts: Any) -> list[np.ndarray]:
    return [np.full(len(prompt_T) - 1, -float(folder.removeprefix("w")), np.float32) for prompt_T in prompts]


@asynccontextmanager
async def stubbed(folder: Path, on_update: str = "keep", canary: bool = True) -> AsyncIterator[tuple[StubVllm, VllmEngine]]:
    """The stub behind a Unix socket, and the engine over it."""
    stub = StubVllm()
    runner = web.AppRunner(stub.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "s")).start()
    api = Api(folder / "s")
    found = Canary([np.array([1, 2, 3], np.int32)], reference, 0.01) if canary else None
    try:
        yield stub, VllmEngine(api, LIMITS, {}, on_update, found)
    finally:
        await api.close()
        await runner.cleanup()


def ask(name: str, **values) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, Sampling(**{"max_tokens": 2, **values}))
