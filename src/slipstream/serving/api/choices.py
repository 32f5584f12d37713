"""One choice of an OpenAI answer: from sampled tokens to text, tool calls and logprobs, at once or piece by piece.

The pieces of a streamed choice join to the choice that is answered at once. Knows OpenAI's response objects; no HTTP, no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.chat.reply import ReplySplitter, StopCutter, cut
from slipstream.chat.stream import TextStream
from slipstream.chat.tokenizer import ChatTokenizer
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


class TextChoice:
    """A choice of /v1/completions."""

    def __init__(self, index: int, tokenizer: ChatTokenizer, stops: Sequence[str], logprobs: bool):
        self.index = index
        self._tokenizer = tokenizer
        self._stops = stops
        self._logprobs = logprobs
        self._stream = TextStream(tokenizer)
        self._cutter = StopCutter(stops)
        self._offset = 0

    def first(self) -> list[Chunk]:
        return []

    def push(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Chunk]:
        ids, logprobs = _without_eos(self._tokenizer, ids, logprobs)
        text = self._cutter.push(self._stream.push(ids))
        return [self._chunk(text, self._scores(ids, logprobs), None)] if text or (self._logprobs and ids) else []

    def last(self, completion: Completion) -> list[Chunk]:
        text = self._cutter.push(self._stream.flush()) + self._cutter.flush()
        return [self._chunk(text, None, completion.finish_reason)]

    def whole(self, completion: Completion) -> dict[str, Any]:
        ids, logprobs = _sampled(self._tokenizer, completion)
        text, _ = cut(self._tokenizer.decode(ids, skip_special=True), self._stops)
        return self._chunk(text, self._scores(ids, logprobs), completion.finish_reason)

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
        self._stops = stops
        self._logprobs = logprobs
        self._stream = TextStream(tokenizer)
        self._cutter = StopCutter(stops)
        self._splitter = ReplySplitter() if calls else None
        self._call_prefix = f"call_{secrets.token_hex(8)}"
        self._calls = 0

    def first(self) -> list[Chunk]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def push(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Chunk]:
        ids, logprobs = _without_eos(self._tokenizer, ids, logprobs)
        chunks = self._split(self._cutter.push(self._stream.push(ids)))
        if self._logprobs and ids:
            chunks = chunks or [self._chunk({})]
            chunks[0]["logprobs"] = self._scores(ids, logprobs)
        return chunks

    def last(self, completion: Completion) -> list[Chunk]:
        chunks = self._split(self._cutter.push(self._stream.flush()) + self._cutter.flush())
        if self._splitter is not None:
            chunks += [self._delta(piece) for piece in self._splitter.flush()]
        return [*chunks, self._chunk({}, self._reason(completion, self._calls))]

    def whole(self, completion: Completion) -> dict[str, Any]:
        ids, logprobs = _sampled(self._tokenizer, completion)
        text, _ = cut(self._tokenizer.decode(ids, skip_special=True), self._stops)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._splitter is not None:
            message = self._tokenizer.parse_reply(text, self._call_prefix)
        calls = message.get("tool_calls", [])
        message = {**message, "content": message["content"] or (None if calls else ""), "refusal": None}
        scores = self._scores(ids, logprobs) if self._logprobs else None
        return {"index": self.index, "message": message, "logprobs": scores, "finish_reason": self._reason(completion, len(calls))}

    def _split(self, text: str) -> list[Chunk]:
        if self._splitter is None:
            return [self._delta(text)] if text else []
        return [self._delta(piece) for piece in self._splitter.push(text)]

    def _delta(self, piece: str | dict[str, str]) -> Chunk:
        if isinstance(piece, str):
            return self._chunk({"content": piece})
        number, self._calls = self._calls, self._calls + 1
        call = {"index": number, "id": f"{self._call_prefix}_{number}", "type": "function", "function": piece}
        return self._chunk({"tool_calls": [call]})

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


def _sampled(tokenizer: ChatTokenizer, completion: Completion) -> tuple[list[int], list[float]]:
    return _without_eos(tokenizer, completion.tokens_N.tolist(), completion.logprobs_N.tolist())


def _without_eos(tokenizer: ChatTokenizer, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[list[int], list[float]]:
    """End-of-reply tokens are structure, not text; they are hidden even where the tokenizer does not mark them as special."""
    kept = [(int(i), float(p)) for i, p in zip(ids, logprobs, strict=True) if int(i) not in tokenizer.eos_ids]
    return [i for i, _ in kept], [p for _, p in kept]
