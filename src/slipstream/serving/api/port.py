"""What the HTTP APIs need of whoever answers: a way from messages to an engine request, its tokens, and a place for the reply.

Two implement it: `EnginePort` below, in which calls know nothing of one another (an engine's own server), and the gateway's sessions
(`slipstream.serving.gateway`). Knows no API.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.errors import EngineUnavailable
from slipstream.ports import Hear, StreamingEngine
from slipstream.serving.api.http import ApiError, FieldError
from slipstream.types import Completion, GenerateRequest, IntArray, Sampling

REST = 2**31 - 1
"""max_tokens of a request that sets none: the rest of the context."""


class Call(Protocol):
    """One engine request."""

    @property
    def request(self) -> GenerateRequest:
        """Its `sampling` is what holds: a session may have its own."""
        ...

    async def run(self, hear: Hear | None) -> Completion:
        """Ask the engine, once. Cancelling aborts the request. Raises EngineError."""
        ...

    def done(self, completion: Completion, reply: Callable[[], dict[str, Any]]) -> None:
        """What `run` returned, and how the client will see it. Raises EngineUnavailable when it was aborted."""
        ...

    def drop(self) -> None:
        """Nobody wants it any more. Does nothing once it has run."""
        ...


class Caller(Protocol):
    """Who makes the calls of one HTTP request. `sampling.max_tokens` is bounded by what there is room for."""

    def chat(self, messages: Sequence[dict], tools: Sequence[dict], sampling: Sampling) -> Call:
        """Raises RequestError: the template refuses the messages, they do not fit the context, or the session has no tokens left."""
        ...

    def text(self, prompt_T: IntArray, sampling: Sampling) -> Call:
        """Plain continuation. Raises RequestError."""
        ...


class Port(Protocol):
    """Behind the routes."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...
    @property
    def model(self) -> str: ...
    @property
    def seq_len(self) -> int: ...
    def caller(self, request: web.Request, model: str | None) -> Caller:
        """Raises ApiError: no such model, no or a wrong key, a session that has ended."""
        ...

    def listed(self, request: web.Request) -> None:
        """May this client see the list of models? Raises ApiError."""
        ...


@dataclass(frozen=True)
class EnginePort:
    """One engine, one model under any name, no keys, and nothing kept between calls."""

    engine: StreamingEngine
    tokenizer: ChatTokenizer
    model: str
    seq_len: int

    def caller(self, request: web.Request, model: str | None) -> EnginePort:
        return self

    def listed(self, request: web.Request) -> None:
        pass

    def chat(self, messages: Sequence[dict], tools: Sequence[dict], sampling: Sampling) -> PlainCall:
        return self._call(self.tokenizer.prompt_ids(messages, tools), sampling, "messages")

    def text(self, prompt_T: IntArray, sampling: Sampling) -> PlainCall:
        return self._call(prompt_T, sampling, "prompt")

    def _call(self, prompt_T: IntArray, sampling: Sampling, param: str) -> PlainCall:
        fitting = replace(sampling, max_tokens=min(sampling.max_tokens, room(prompt_T, self.seq_len, param)))
        return PlainCall(self.engine, GenerateRequest(f"call-{secrets.token_hex(12)}", prompt_T, fitting))


@dataclass(frozen=True, slots=True)
class PlainCall:
    """A call of which nothing is kept."""

    engine: StreamingEngine
    request: GenerateRequest

    async def run(self, hear: Hear | None) -> Completion:
        return await (self.engine.generate(self.request) if hear is None else self.engine.stream(self.request, hear))

    def done(self, completion: Completion, reply: Callable[[], dict[str, Any]]) -> None:
        if completion.finish_reason == "abort":
            raise EngineUnavailable("the request was aborted (by an admin or a weight update); send it again")

    def drop(self) -> None:
        pass


def room(prompt_T: IntArray, seq_len: int, param: str) -> int:
    """Tokens that can be sampled after this prompt. Raises ApiError naming `param` when there is no prompt or no room."""
    if not len(prompt_T):
        raise FieldError(param, "empty: there is nothing to continue")
    if len(prompt_T) >= seq_len:
        what = f"{len(prompt_T)} tokens; the context is {seq_len} tokens, so a prompt has at most {seq_len - 1}. Shorten it"
        raise ApiError(400, f"{param}: {what}", param=param, code="context_length_exceeded")
    return seq_len - len(prompt_T)
