"""Request bodies of Anthropic's Messages API, checked, and the chat that they stand for in OpenAI's message format.

As in openai_types: what changes the sampling and cannot be honoured is refused; what only describes the request is ignored (metadata,
cache_control, service_tier, is_error of a tool result, which its text says). Knows no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slipstream.serving.api.http import FieldError
from slipstream.types import Sampling


class CountBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """In OpenAI's form; with tool_choice none the model sees none and its text is not searched for calls."""
        if (self.tool_choice or {}).get("type") == "none":
            return []
        return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(self.tools or [])]

    def chat(self) -> list[dict[str, Any]]:
        """The conversation in OpenAI's form. Raises FieldError."""
        if not self.messages:
            raise FieldError("messages", "empty; send at least one message such as {'role': 'user', 'content': 'Hello'}")
        if self.messages[-1].get("role") == "assistant":
            raise FieldError(
                "messages", "the last one is the assistant's, and continuing a reply is not supported; end with a user message"
            )
        system = [] if self.system is None else [{"role": "system", "content": _text("system", self.system)}]
        return [*system, *(chat for i, message in enumerate(self.messages) for chat in _chat(f"messages[{i}]", message))]

    def check(self) -> None:
        """Raises FieldError for what the engine cannot do."""
        if (kind := (self.tool_choice or {"type": "auto"}).get("type")) not in ("auto", "none"):
            raise FieldError("tool_choice", f"type {kind!r} is not supported; use 'auto' or 'none'")
        if self.thinking is not None and self.thinking.get("type") != "disabled":
            raise FieldError("thinking", f"{self.thinking!r} is not supported; use {{'type': 'disabled'}} or leave it out")


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
        )

    def check(self) -> None:
        super().check()
        if any(not text for text in self.stop_sequences or ()):
            raise FieldError("stop_sequences", "an empty string would end every completion at once; leave it out")


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise FieldError(where, f"type {tool['type']!r} runs on the provider's servers and is not supported; offer tools of your own")
    if not isinstance(tool.get("name"), str):
        raise FieldError(where, "expected {'name': ..., 'description': ..., 'input_schema': {...}}")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool.get("input_schema") or {}}
    return {"type": "function", "function": function}


def _chat(where: str, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One message of theirs is one or more of OpenAI's: the results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise FieldError(f"{where}.role", f"{role!r}; expected 'user' or 'assistant'")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise FieldError(f"{where}.content", f"{content!r}; expected a string or a list of blocks")
    blocks = [(f"{where}.content[{i}]", block) for i, block in enumerate(content)]
    if role == "assistant":
        yield _assistant(blocks)
        return
    texts: list[str] = []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": _id(place, block, "tool_use_id"), "content": _text(place, block.get("content") or "")}
        else:
            texts.append(_block_text(place, block))
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _assistant(blocks: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    texts, calls = [], []
    for place, block in blocks:
        if block.get("type") == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                raise FieldError(place, "expected {'type': 'tool_use', 'id': ..., 'name': ..., 'input': {...}}")
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": _id(place, block, "id"), "type": "function", "function": function})
        else:
            texts.append(_block_text(place, block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _id(where: str, block: dict[str, Any], name: str) -> str:
    if not isinstance(block.get(name), str):
        raise FieldError(f"{where}.{name}", f"{block.get(name)!r}; expected the id of a tool call")
    return block[name]


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(where, f"{content!r}; expected a string or a list of text blocks")
    return "".join(_block_text(f"{where}[{i}]", block) for i, block in enumerate(content))


def _block_text(where: str, block: Any) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise FieldError(where, "only blocks {'type': 'text', 'text': ...} are supported here; this model reads no images or documents")
    return block["text"]
