"""Request bodies of the OpenAI-compatible routes, checked, and what the engine is asked in their place.

Fields that change what is sampled and that the engine cannot honour are refused, never ignored; fields that only describe the request
(user, metadata, store, ...) are ignored, as are unknown ones. `top_k`, `min_p` and `stop_token_ids` are vLLM's names for more sampling.
Knows no HTTP and no engine.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slipstream.serving.api.http import FieldError
from slipstream.types import Sampling

MAX_CHOICES = 128


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class SamplingBody(msgspec.Struct, kw_only=True):
    """What both routes share."""

    model: str | None = None
    """The gateway answers 404 where it is another than its policy's; an engine's own server accepts any name and says which it has."""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        """For one of the n choices: choice i samples with seed + i."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            max_tokens=max_tokens,
            stop=tuple(self.stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
        )

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def check(self) -> None:
        """Raises FieldError for what the engine cannot do."""
        if any(not text for text in self.stops):
            raise FieldError("stop", "an empty string would end every completion at once; leave it out")
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise FieldError(name, f"{getattr(self, name)} is not supported; use 0 or leave it out")
        if self.logit_bias:
            raise FieldError("logit_bias", "not supported; leave it out")


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model is shown; with tool_choice 'none' it sees none and its text is not searched for calls."""
        return [] if self.tool_choice == "none" else self.tools or []

    def check(self) -> None:
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            raise FieldError("tool_choice", f"{self.tool_choice!r} is not supported; use 'auto' or 'none'")
        if self.top_logprobs:
            raise FieldError("top_logprobs", f"{self.top_logprobs} is not supported: only the sampled token's logprob is kept; use 0")
        if (self.response_format or {}).get("type", "text") != "text":
            raise FieldError("response_format", f"{self.response_format!r} is not supported; use {{'type': 'text'}} or leave it out")
        for i, tool in enumerate(self.tools or []):
            if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
                raise FieldError(f"tools[{i}]", "expected {'type': 'function', 'function': {'name': ..., 'parameters': ...}}")
        self.messages = [_checked_message(i, message) for i, message in enumerate(self.messages)]
        if not self.messages:
            raise FieldError("messages", "empty; send at least one message such as {'role': 'user', 'content': 'Hello'}")


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    """Text, several texts, token ids, or several lists of token ids."""
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.logprobs:
            raise FieldError("logprobs", f"{self.logprobs} is not supported: only the sampled token's logprob is kept; use 0")
        if self.echo:
            raise FieldError("echo", "true is not supported; leave it out")
        if self.suffix:
            raise FieldError("suffix", "not supported; leave it out")
        if self.best_of not in (None, 1, self.n):
            raise FieldError("best_of", f"{self.best_of} is not supported; use n")


def _checked_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string. Raises FieldError naming the part that does not fit."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise FieldError(f"{where}.role", f"{message.get('role')!r}; expected 'system', 'user', 'assistant' or 'tool'")
    calls = message.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
    ):
        raise FieldError(f"{where}.tool_calls", "expected a list of {'id': ..., 'type': 'function', 'function': {'name', 'arguments'}}")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))}
    if content is not None and not isinstance(content, str):
        raise FieldError(f"{where}.content", f"{content!r}; expected a string or a list of text parts")
    return message


def _part_text(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise FieldError(where, "only parts {'type': 'text', 'text': ...} are supported; this model reads no images or audio")
    return part["text"]
