"""The text of a reply: from sampled tokens to content and tool calls, at once or piece by piece. Knows no API and no engine.

The pieces of a streamed reply join to the message that is answered at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from slipstream.chat.reply import ReplySplitter, StopCutter, cut
from slipstream.chat.stream import TextStream
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.types import Completion

Piece = str | dict[str, str]
"""Content, or a tool call {id, name, arguments}."""


class Reply:
    """One reply. `calls`: look for tool calls in the text."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str], calls: bool):
        self._tokenizer = tokenizer
        self._stops = stops
        self._stream = TextStream(tokenizer)
        self._cutter = StopCutter(stops)
        self._splitter = ReplySplitter() if calls else None
        self._id_prefix = f"call_{secrets.token_hex(8)}"
        self.num_calls = 0

    def push(self, ids: Sequence[int]) -> list[Piece]:
        """What became certain with these tokens."""
        return self._split(self._cutter.push(self._stream.push(ids)))

    def flush(self) -> list[Piece]:
        """The rest."""
        pieces = self._split(self._cutter.push(self._stream.flush()) + self._cutter.flush())
        return pieces if self._splitter is None else [*pieces, *map(self._named, self._splitter.flush())]

    def message(self, completion: Completion) -> dict[str, Any]:
        """The whole reply as a chat message."""
        text, _ = self.text(completion)
        if self._splitter is None:
            return {"role": "assistant", "content": text}
        return self._tokenizer.parse_reply(text, self._id_prefix)

    def text(self, completion: Completion) -> tuple[str, str | None]:
        """The text before the first stop string, and which one that is."""
        ids, _ = sampled(self._tokenizer, completion)
        whole = self._tokenizer.decode(ids, skip_special=True)
        text, stopped = cut(whole, self._stops)
        return text, next((stop for stop in self._stops if whole.startswith(stop, len(text))), None) if stopped else None

    def _split(self, text: str) -> list[Piece]:
        if self._splitter is None:
            return [text] if text else []
        return [self._named(piece) for piece in self._splitter.push(text)]

    def _named(self, piece: Piece) -> Piece:
        if isinstance(piece, str):
            return piece
        number, self.num_calls = self.num_calls, self.num_calls + 1
        return {"id": f"{self._id_prefix}_{number}", **piece}


def sampled(tokenizer: ChatTokenizer, completion: Completion) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of the text."""
    return without_eos(tokenizer, completion.tokens_N.tolist(), completion.logprobs_N.tolist())


def without_eos(tokenizer: ChatTokenizer, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[list[int], list[float]]:
    """End-of-reply tokens are structure, not text; they are hidden even where the tokenizer does not mark them as special."""
    kept = [(int(i), float(p)) for i, p in zip(ids, logprobs, strict=True) if int(i) not in tokenizer.eos_ids]
    return [i for i, _ in kept], [p for _, p in kept]
