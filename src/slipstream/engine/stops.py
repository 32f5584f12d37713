"""What ends a sequence beside its length: stop ids, and stop strings in the text of the last few sampled tokens.

For strings only the tail is decoded, and only when the newest token can have finished a stop string: its own text holds the string's last
character, or is not whole characters. Knows nothing of sequences.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from slipstream.chat.tokenizer import ChatTokenizer

_SLACK_TOKENS = 4
"""Tokens in front of the longest stop string, so that a character which the tail cuts in two cannot lie in it."""


class Detokenizer(Protocol):
    """What is needed of `chat.tokenizer.ChatTokenizer`."""

    def decode(self, ids: np.ndarray, skip_special: bool = False) -> str: ...


class Stops:
    """Of the model in `folder`. Its tokenizer is read when it is first needed."""

    def __init__(self, folder: Path, eos_ids: tuple[int, ...]) -> None:
        """`eos_ids`: what the model's configuration names."""
        self._folder, self._eos_ids = folder, eos_ids

    @cached_property
    def ids(self) -> frozenset[int]:
        """End-of-sequence ids: of the configuration, and of the tokenizer if there is one."""
        has_tokenizer = (self._folder / "tokenizer.json").exists()
        return frozenset(self._eos_ids) | (self._tokenizer.eos_ids if has_tokenizer else frozenset())

    @cached_property
    def text(self) -> StopText:
        """Raises ModelError when there is no tokenizer."""
        return StopText(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self._folder, need_template=False)


class StopText:
    """Matches stop strings against detokenised completions."""

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def hit(self, completion_N: np.ndarray, stops: tuple[str, ...]) -> bool:
        """Whether the completion, whose last token is new, now contains one of `stops`."""
        piece = self._piece(int(completion_N[-1]))
        if not any(_may_end(piece, stop) for stop in stops):
            return False
        window = max(len(stop.encode()) for stop in stops) + _SLACK_TOKENS
        text = self._tokenizer.decode(completion_N[-window:])
        return any(stop in text for stop in stops)

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._tokenizer.decode(np.array([token], np.int32))
        return piece


def _may_end(piece: str, stop: str) -> bool:
    """A lone token loses its leading space in some tokenizers and decodes to U+FFFD when it is part of a character."""
    return not piece or "\ufffd" in piece or stop[-1] in piece or stop[-1].isspace()
