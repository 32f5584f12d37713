"""The conversations of one rollout as a tree of replies, so that a call goes on from the very tokens of what it continues.

    [user] -> reply 1 -> [tool] -> reply 2 -> [tool] -> reply 3          the usual rollout: one branch
                    \\-> [other tool] -> reply 4                          branched: goes on from a reply that was gone on from already
    [user, assistant (edited), tool] -> reply 5                          rewritten: contains a reply that nobody here sampled

A call goes on from the longest recorded conversation that its messages begin with: its prompt is those tokens plus the link
(`chat.prefix`). Messages are compared by what they say: clients send a reply back with other spacing in its arguments, with null for no
content, or with fields of their own. Suffix T: tokens. Knows neither engines nor environments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from slipstream.chat.prefix import TurnTokens
from slipstream.types import ChatMessage, IntArray

Fork = Literal["", "branched", "rewritten"]


@dataclass(slots=True, eq=False)
class _Reply:
    """A recorded reply, with the prompt that it answers."""

    prompt_T: IntArray
    completion_T: IntArray
    continued: bool = False
    """A call goes on from it, or has."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One call of the policy."""

    tokens_T: IntArray
    known: int
    """Leading tokens whose routing an earlier call on this branch brings. 0: none."""
    fork: Fork
    key: bytes
    """The conversation as a hash."""
    after: _Reply | None


class Branches:
    """What the policy has said so far, and to what."""

    def __init__(self, turn_tokens: TurnTokens):
        self._turn_tokens = turn_tokens
        self._replies: dict[bytes, list[_Reply]] = {}
        """By the conversation that ends with them."""
        self._started = False

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[dict] = ()) -> Prompt:
        """The prompt of the next reply; the branch that it goes on from is taken until `release`.

        Raises RequestError: the chat template refuses the messages.
        """
        keys = list(_keys(messages, tools))
        length = next((i for i in range(len(messages), 0, -1) if keys[i] in self._replies), 0)
        rest = [dict(message) for message in messages[length:]]
        first, self._started = not self._started, True
        if length == 0:
            tokens_T = self._turn_tokens.prompt(rest, tools)
            return Prompt(tokens_T, 0, "" if first else _fork(rest), keys[-1], None)
        found = self._replies[keys[length]]
        reply = next((reply for reply in found if not reply.continued), found[-1])
        link_T = self._turn_tokens.link(reply.completion_T, rest)
        tokens_T = np.concatenate([reply.prompt_T, reply.completion_T, link_T])
        if reply.continued:  # the branch's own call has the rows before; this one becomes a sample of its own and needs them all
            return Prompt(tokens_T, 0, _fork(rest), keys[-1], None)
        reply.continued = True
        fork = "rewritten" if _fork(rest) == "rewritten" else ""
        return Prompt(tokens_T, len(tokens_T) - len(link_T), fork, keys[-1], reply)

    def add(self, prompt: Prompt, completion_T: IntArray, message: ChatMessage) -> None:
        """The prompt was answered by these tokens, which the caller was given as `message`."""
        self._replies.setdefault(_extend(prompt.key, message), []).append(_Reply(prompt.tokens_T, completion_T))

    def release(self, prompt: Prompt) -> None:
        """The prompt was not answered: another call may go on from where it did."""
        if prompt.after is not None:
            prompt.after.continued = False


def _fork(rest: Sequence[ChatMessage]) -> Fork:
    return "rewritten" if any(message.get("role") == "assistant" for message in rest) else "branched"


def _keys(messages: Sequence[ChatMessage], tools: Sequence[dict]) -> Iterator[bytes]:
    """Hash of the first 0, 1, 2, ... messages."""
    key = xxhash.xxh3_128_digest(msgspec.json.encode(tools, order="sorted"))
    yield key
    for message in messages:
        key = _extend(key, message)
        yield key


def _extend(key: bytes, message: ChatMessage) -> bytes:
    return xxhash.xxh3_128_digest(key + json.dumps(_meaning(message), sort_keys=True, default=repr).encode("utf-8", "surrogatepass"))


def _meaning(message: ChatMessage) -> list[Any]:
    """What a message says, however it is written."""
    role, content = message.get("role"), message.get("content") or ""
    if role == "assistant" and isinstance(content, str):
        content = content.strip()
    calls = [
        [call.get("id"), call.get("function", {}).get("name"), _arguments(call.get("function", {}).get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return [role, content, calls, message.get("tool_call_id"), message.get("name")]


def _arguments(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
