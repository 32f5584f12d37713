"""OpenAI-compatible routes over the driver: /v1/models, /v1/completions, /v1/chat/completions, with streaming and tool calls.

A request becomes one engine request a choice, all heard through one queue; a blocking answer drains it, a streaming one forwards it.
Knows chats, tokens and HTTP; nothing of scheduling. What the fields mean is OpenAI's API reference; what is refused is in openai_types.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.engine.choices import ChatChoice, Choice, TextChoice
from slipstream.engine.driver import EngineDriver, Event
from slipstream.engine.http import FieldError, error_body, error_response, json_response, read_json
from slipstream.engine.openai_types import ChatBody, CompletionBody, SamplingBody
from slipstream.errors import EngineUnavailable
from slipstream.types import Completion, GenerateRequest, IntArray

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when left out, as in OpenAI's API; chats get the rest of the context."""


def openai_routes(driver: EngineDriver, tokenizer: ChatTokenizer, model_name: str) -> list[web.RouteDef]:
    """The three routes."""
    created, seq_len = int(time.time()), driver.engine.seq_len

    async def models(_: web.Request) -> web.Response:
        card = {"id": model_name, "object": "model", "created": created, "owned_by": "slipstream", "max_model_len": seq_len}
        return json_response({"object": "list", "data": [card]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body: ChatBody = await read_json(request, ChatBody)
        body.check()
        prompt_T = tokenizer.prompt_ids(body.messages, body.offered_tools)
        room = _room(prompt_T, seq_len, "messages")
        answer = _Answer(f"chatcmpl-{secrets.token_hex(12)}", "chat.completion", model_name)
        for i in range(body.n or 1):
            choice = ChatChoice(i, tokenizer, body.stops, bool(body.logprobs), bool(body.offered_tools))
            answer.add(choice, prompt_T, body, min(body.max_completion_tokens or body.max_tokens or room, room), i)
        return await _respond(request, driver, answer, body)

    async def completions(request: web.Request) -> web.StreamResponse:
        body: CompletionBody = await read_json(request, CompletionBody)
        body.check()
        answer = _Answer(f"cmpl-{secrets.token_hex(12)}", "text_completion", model_name)
        for prompt_T in _prompts(body.prompt, tokenizer):
            room = _room(prompt_T, seq_len, "prompt")
            for i in range(body.n or 1):
                choice = TextChoice(len(answer.choices), tokenizer, body.stops, body.logprobs is not None)
                answer.add(choice, prompt_T, body, min(body.max_tokens or DEFAULT_COMPLETION_TOKENS, room), i)
        return await _respond(request, driver, answer, body)

    return [web.get("/v1/models", models), web.post("/v1/chat/completions", chat), web.post("/v1/completions", completions)]


@dataclass
class _Answer:
    """One HTTP answer in the making."""

    id: str
    kind: str
    model_name: str
    choices: list[Choice] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    leading: set[int] = field(default_factory=set)
    """The first choice of each prompt: usage counts a prompt once, however many choices it has."""
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, choice: Choice, prompt_T: IntArray, body: SamplingBody, max_tokens: int, number: int) -> None:
        """`number` counts the choices of this prompt."""
        if number == 0:
            self.leading.add(choice.index)
        self.choices.append(choice)
        self.requests.append(GenerateRequest(f"{self.id}-{choice.index}", prompt_T, body.sampling(max_tokens, number)))

    def usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """`done` in the order of the choices."""
        prompt = sum(len(self.requests[i].prompt_T) for i in self.leading)
        sampled = sum(len(completion.tokens_N) for completion in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": sum(done[i].cached_tokens for i in self.leading)},
        }

    def body(self, choices: Sequence[dict[str, Any]], chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk and self.kind == "chat.completion" else self.kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model_name, "choices": list(choices)}


async def _respond(request: web.Request, driver: EngineDriver, answer: _Answer, body: SamplingBody) -> web.StreamResponse:
    """Start every choice, then answer. Leaving early (the client went away, one choice failed) aborts the ones still running."""
    events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def hear(index: int, event: Event) -> None:
        if body.stream or not isinstance(event, tuple):
            events.put_nowait((index, event))

    with ExitStack() as running:
        try:
            for choice, engine_request in zip(answer.choices, answer.requests, strict=True):
                running.enter_context(driver.listen(engine_request, partial(hear, choice.index)))
        except EngineUnavailable as error:
            return error_response(error, 429 if driver.ready else 503)
        if body.stream:
            return await _stream(request, answer, events, bool(body.stream_options and body.stream_options.include_usage))
        done: dict[int, Completion] = {}
        while len(done) < len(answer.choices):
            index, event = await events.get()
            done[index] = _completion(event)
    choices = [choice.whole(done[choice.index]) for choice in answer.choices]
    return json_response({**answer.body(choices), "usage": answer.usage([done[i] for i in sorted(done)])})


async def _stream(request: web.Request, answer: _Answer, events: asyncio.Queue[tuple[int, Event]], usage: bool) -> web.StreamResponse:
    """Server-sent events. An error after the start is an event too: the status has gone out already."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        async for payload in _payloads(answer, events, usage):
            await response.write(b"data: " + msgspec.json.encode(payload) + b"\n\n")
    except EngineUnavailable as error:
        await response.write(b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _payloads(answer: _Answer, events: asyncio.Queue[tuple[int, Event]], usage: bool) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, in OpenAI's order: roles, deltas, finish reasons, usage."""
    extra: dict[str, Any] = {"usage": None} if usage else {}
    for choice in answer.choices:
        for chunk in choice.first():
            yield {**answer.body([chunk], chunk=True), **extra}
    done: dict[int, Completion] = {}
    while len(done) < len(answer.choices):
        index, event = await events.get()
        choice = answer.choices[index]
        if isinstance(event, tuple):
            chunks = choice.push(*event)
        else:
            done[index] = _completion(event)
            chunks = choice.last(done[index])
        for chunk in chunks:
            yield {**answer.body([chunk], chunk=True), **extra}
    if usage:
        yield {**answer.body([], chunk=True), "usage": answer.usage([done[i] for i in sorted(done)])}


def _completion(event: Event) -> Completion:
    """Raises what the event is, when it is an error; an aborted request has no answer."""
    if isinstance(event, Exception):
        raise event
    assert isinstance(event, Completion)
    if event.finish_reason == "abort":
        raise EngineUnavailable("the request was aborted (by an admin or a weight update); send it again")
    return event


def _room(prompt_T: IntArray, seq_len: int, param: str) -> int:
    """Tokens that can be sampled after this prompt. Raises FieldError when there is no prompt or no room."""
    if not len(prompt_T):
        raise FieldError(param, "empty: there is nothing to continue")
    if len(prompt_T) >= seq_len:
        raise FieldError(
            param, f"{len(prompt_T)} tokens; the context is {seq_len} tokens, so a prompt has at most {seq_len - 1}. Shorten it"
        )
    return seq_len - len(prompt_T)


def _prompts(prompt: str | list[Any], tokenizer: ChatTokenizer) -> list[IntArray]:
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if not prompt:
        raise FieldError("prompt", "empty: there is nothing to continue")
    if all(isinstance(entry, int) for entry in prompt):
        return [_ids(prompt, "prompt", tokenizer)]
    return [_one_of_several(entry, f"prompt[{i}]", tokenizer) for i, entry in enumerate(prompt)]


def _one_of_several(entry: str | int | list[int], param: str, tokenizer: ChatTokenizer) -> IntArray:
    if isinstance(entry, int):
        raise FieldError(param, f"{entry} stands among texts or lists; send either one list of token ids or several texts or lists")
    return tokenizer.encode(entry) if isinstance(entry, str) else _ids(entry, param, tokenizer)


def _ids(ids: Any, param: str, tokenizer: ChatTokenizer) -> IntArray:
    wrong = [i for i in ids if not 0 <= i < tokenizer.vocab_size]
    if wrong:
        raise FieldError(param, f"token id {wrong[0]} is outside the vocabulary (0 to {tokenizer.vocab_size - 1})")
    return np.array(ids, dtype=np.int32)
