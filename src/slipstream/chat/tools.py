"""Tool calls in the text of a reply: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes and Qwen form).

Knows text and OpenAI's message format, not tokens, models or tools. Whatever a model writes is legal input: a block that is not a
well-formed call stays in the content, where the environment or the user sees it.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE, "<tool_response>", "</tool_response>")
"""Strings that carry the structure of a reply: never hidden from its text, even where they are special tokens."""

_BLOCK = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


def parse_reply(text: str, id_prefix: str = "call") -> dict[str, Any]:
    """The assistant message that this text is: content, and tool_calls where it has well-formed ones. Never raises.

    Calls are numbered '<id_prefix>_0', '<id_prefix>_1', ...: the same text gives the same message. Pass another prefix each turn where
    ids must be unique in a conversation.
    """
    calls: list[dict[str, Any]] = []

    def take(block: re.Match[str]) -> str:
        function = parse_call(block.group(1))
        if function is None:
            return block.group(0)
        calls.append({"id": f"{id_prefix}_{len(calls)}", "type": "function", "function": function})
        return ""

    content = _BLOCK.sub(take, text).strip()
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return message


def parse_call(text: str) -> dict[str, str] | None:
    """The body of one block as {name, arguments: JSON text}; None when it is not an object with a name and an arguments object."""
    try:
        call = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments", {}), dict):
            return None
        function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}
        "".join(function.values()).encode()  # lone surrogates ("\ud800") are legal JSON and no legal text
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return None
    return function


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
