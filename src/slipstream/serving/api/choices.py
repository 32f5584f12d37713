"""One choice of an OpenAI answer: text, tool calls and logprobs as OpenAI's response objects, at once or piece by piece.

The pieces of a streamed choice join to the choice that is answered at once. Knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.serving.api.reply import Piece, Reply, sampled, without_eos
from slipstream.types import Completion

Chunk = dict[str, Any]
"""One entry of `choices` in a streamed chunk."""


class Choice(Protocol):
    """What the routes need of a choice."""

    index: int

    def first(self) -> list[Chunk]:
        """What a stream starts with."""
        ...

    def push(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Chunk]:
        """What became certain with these tokens."""
        ...

    def last(self, completion: Completion) -> list[Chunk]:
        """The rest, with the finish reason."""
        ...

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        ...

    def message(self, completion: Completion) -> dict[str, Any]:
        """The reply as a chat message."""
        ...


class TextChoice:
    """A choice of /v1/completions."""

    def __init__(self, index: int, tokenizer: ChatTokenizer, stops: Sequence[str], logprobs: bool):
        self.index = index
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._reply = Reply(tokenizer, stops, calls=False)
        self._offset = 0

    def first(self) -> list[Chunk]:
        return []

    def push(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Chunk]:
        ids, logprobs = without_eos(self._tokenizer, ids, logprobs)
        text = _joined(self._reply.push(ids))
        return [self._chunk(text, self._scores(ids, logprobs), None)] if text or (self._logprobs and ids) else []

    def last(self, completion: Completion) -> list[Chunk]:
        return [self._chunk(_joined(self._reply.flush()), None, completion.finish_reason)]

    def whole(self, completion: Completion) -> dict[str, Any]:
        text, _ = self._reply.text(completion)
        return self._chunk(text, self._scores(*sampled(self._tokenizer, completion)), completion.finish_reason)

    def message(self, completion: Completion) -> dict[str, Any]:
        return self._reply.message(completion)

    def _chunk(self, text: str, scores: dict[str, Any] | None, reason: str | None) -> Chunk:
        return {"index": self.index, "text": text, "logprobs": scores, "finish_reason": reason}

    def _scores(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens = [self._tokenizer.decode([i]) for i in ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


class ChatChoice:
    """A choice of /v1/chat/completions. `calls`: look for tool calls in the text."""

    def __init__(self, index: int, tokenizer: ChatTokenizer, stops: Sequence[str], logprobs: bool, calls: bool):
        self.index = index
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._reply = Reply(tokenizer, stops, calls)
        self._calls = 0

    def first(self) -> list[Chunk]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def push(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Chunk]:
        ids, logprobs = without_eos(self._tokenizer, ids, logprobs)
        chunks = [self._delta(piece) for piece in self._reply.push(ids)]
        if self._logprobs and ids:
            chunks = chunks or [self._chunk({})]
            chunks[0]["logprobs"] = self._scores(ids, logprobs)
        return chunks

    def last(self, completion: Completion) -> list[Chunk]:
        chunks = [self._delta(piece) for piece in self._reply.flush()]
        return [*chunks, self._chunk({}, self._reason(completion, self._calls))]

    def whole(self, completion: Completion) -> dict[str, Any]:
        message = self._reply.message(completion)
        calls = message.get("tool_calls", [])
        message = {**message, "content": message["content"] or (None if calls else ""), "refusal": None}
        scores = self._scores(*sampled(self._tokenizer, completion)) if self._logprobs else None
        return {"index": self.index, "message": message, "logprobs": scores, "finish_reason": self._reason(completion, len(calls))}

    def message(self, completion: Completion) -> dict[str, Any]:
        return self._reply.message(completion)

    def _delta(self, piece: Piece) -> Chunk:
        if isinstance(piece, str):
            return self._chunk({"content": piece})
        number, self._calls = self._calls, self._calls + 1
        function = {"name": piece["name"], "arguments": piece["arguments"]}
        return self._chunk({"tool_calls": [{"index": number, "id": piece["id"], "type": "function", "function": function}]})

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> Chunk:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _scores(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([i]) for i in ids]
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    @staticmethod
    def _reason(completion: Completion, calls: int) -> str:
        return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))
