"""Stop strings: does the text of the last few sampled tokens contain one?

Only the tail is decoded, and only when the newest token can have finished a stop string: its own text holds the string's last character,
or is not whole characters. Knows nothing of sequences.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_SLACK_TOKENS = 4
"""Tokens in front of the longest stop string, so that a character which the tail cuts in two cannot lie in it."""


class Detokenizer(Protocol):
    """What is needed of `chat.tokenizer.ChatTokenizer`."""

    def decode(self, ids: np.ndarray, skip_special: bool = False) -> str: ...


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
