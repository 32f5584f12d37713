"""OpenAI-compatible routes over a port: /v1/models, /v1/completions, /v1/chat/completions, with streaming and tool calls.

Knows chats, tokens and HTTP; nothing of engines. What the fields mean is OpenAI's API reference; what is refused is in openai_types.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.serving.api.answer import Event, Part, Tail, completions, sse, stream
from slipstream.serving.api.choices import ChatChoice, Choice, TextChoice
from slipstream.serving.api.http import FieldError, Handler, json_response, read_json
from slipstream.serving.api.openai_types import ChatBody, CompletionBody, SamplingBody
from slipstream.serving.api.port import REST, Call, Port
from slipstream.types import Completion, IntArray

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when left out, as in OpenAI's API; chats get the rest of the context."""


def openai_routes(port: Port) -> list[tuple[str, str, Handler]]:
    """(method, path, handler) of the three routes."""
    created = int(time.time())

    async def models(request: web.Request) -> web.Response:
        port.listed(request)
        card = {"id": port.model, "object": "model", "created": created, "owned_by": "slipstream", "max_model_len": port.seq_len}
        return json_response({"object": "list", "data": [card]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body: ChatBody = await read_json(request, ChatBody)
        caller = port.caller(request, body.model)
        body.check()
        answer = _Answer(f"chatcmpl-{secrets.token_hex(12)}", "chat.completion", port.model)
        with answer.started():
            for i in range(body.n or 1):
                sampling = body.sampling(body.max_completion_tokens or body.max_tokens or REST, i)
                call = caller.chat(body.messages, body.offered_tools, sampling)
                choice = ChatChoice(i, port.tokenizer, call.request.sampling.stop, bool(body.logprobs), bool(body.offered_tools))
                answer.add(choice, call, leads=i == 0)
        return await _respond(request, answer, body)

    async def complete(request: web.Request) -> web.StreamResponse:
        body: CompletionBody = await read_json(request, CompletionBody)
        caller = port.caller(request, body.model)
        body.check()
        answer = _Answer(f"cmpl-{secrets.token_hex(12)}", "text_completion", port.model)
        with answer.started():
            for prompt_T, i in product(_prompts(body.prompt, port.tokenizer), range(body.n or 1)):
                call = caller.text(prompt_T, body.sampling(body.max_tokens or DEFAULT_COMPLETION_TOKENS, i))
                choice = TextChoice(len(answer.choices), port.tokenizer, call.request.sampling.stop, body.logprobs is not None)
                answer.add(choice, call, leads=i == 0)
        return await _respond(request, answer, body)

    return [("GET", "/v1/models", models), ("POST", "/v1/chat/completions", chat), ("POST", "/v1/completions", complete)]


@dataclass
class _Answer:
    """One HTTP answer in the making."""

    id: str
    kind: str
    model_name: str
    choices: list[Choice] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    leading: list[int] = field(default_factory=list)
    """The first choice of each prompt: usage counts a prompt once, however many choices it has."""
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, choice: Choice, call: Call, leads: bool) -> None:
        if leads:
            self.leading.append(choice.index)
        self.choices.append(choice)
        self.calls.append(call)

    @contextmanager
    def started(self) -> Iterator[None]:
        """While the choices are added: one that is refused takes the others with it."""
        try:
            yield
        except BaseException:
            for call in self.calls:
                call.drop()
            raise

    @property
    def parts(self) -> list[Part]:
        return [Part(call, choice.message) for call, choice in zip(self.calls, self.choices, strict=True)]

    def usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """`done` in the order of the choices."""
        prompt = sum(len(self.calls[i].request.prompt_T) for i in self.leading)
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


async def _respond(request: web.Request, answer: _Answer, body: SamplingBody) -> web.StreamResponse:
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return await stream(request, answer.parts, lambda events: _chunks(answer, events, usage))
    done = await completions(answer.parts)
    choices = [choice.whole(done[choice.index]) for choice in answer.choices]
    return json_response({**answer.body(choices), "usage": answer.usage(done)})


async def _chunks(answer: _Answer, events: AsyncIterator[Event], usage: bool) -> AsyncIterator[bytes]:
    """The chunks of a stream, in OpenAI's order: roles, deltas, finish reasons, usage."""
    extra: dict[str, Any] = {"usage": None} if usage else {}
    for choice in answer.choices:
        for chunk in choice.first():
            yield sse({**answer.body([chunk], chunk=True), **extra})
    done: dict[int, Completion] = {}
    tails = [Tail() for _ in answer.choices]
    async for index, event in events:
        choice = answer.choices[index]
        chunks = choice.push(*tails[index].news(event))
        if isinstance(event, Completion):
            done[index] = event
            chunks += choice.last(event)
        for chunk in chunks:
            yield sse({**answer.body([chunk], chunk=True), **extra})
    if usage:
        yield sse({**answer.body([], chunk=True), "usage": answer.usage([done[i] for i in sorted(done)])})
    yield b"data: [DONE]\n\n"


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
