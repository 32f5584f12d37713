"""Streaming of replies: cut at stop strings, and split into content and tool calls, as early as is certain.

Knows text only. What the pieces join to is what the whole text gives at once: `cut` and `parse_reply` are the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.chat.tools import CLOSE, OPEN, parse_call


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string in it, and whether there was one."""
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


class StopCutter:
    """Lets text through up to the first stop string, and holds back what could be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self._ended = False

    def push(self, text: str) -> str:
        if self._ended or not self._stops:
            return "" if self._ended else text
        released, self._ended = cut(self._held + text, self._stops)
        held = 0 if self._ended else max(partial_suffix(released, stop) for stop in self._stops)
        self._held = released[len(released) - held :]
        return released[: len(released) - held]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self._ended else held


class ReplySplitter:
    """Splits a growing reply into content and complete tool calls; the pieces join to what `parse_reply` makes of the whole."""

    def __init__(self) -> None:
        self._held = ""
        self._space = ""
        """White space that is only content if more content follows: the content as a whole is stripped."""
        self._started = False

    def push(self, text: str) -> list[str | dict[str, str]]:
        """Pieces that became certain: content (str) and calls ({name, arguments})."""
        self._held += text
        pieces: list[str | dict[str, str]] = []
        while (start := self._held.find(OPEN)) >= 0 and (end := self._held.find(CLOSE, start)) >= 0:
            end += len(CLOSE)
            call = parse_call(self._held[start + len(OPEN) : end - len(CLOSE)])
            pieces.append(self._content(self._held[: end if call is None else start]))
            if call is not None:
                pieces.append(call)
            self._held = self._held[end:]
        keep = self._held.find(OPEN)
        if keep < 0:
            keep = len(self._held) - partial_suffix(self._held, OPEN)
        pieces.append(self._content(self._held[:keep]))
        self._held = self._held[keep:]
        return [piece for piece in pieces if piece]

    def flush(self) -> list[str | dict[str, str]]:
        """The rest: a block that was never closed is content."""
        rest, self._held = self._content(self._held), ""
        return [rest] if rest else []

    def _content(self, text: str) -> str:
        text = self._space + text
        if not self._started:
            text = text.lstrip()
        released = text.rstrip()
        self._space = text[len(released) :]
        self._started = self._started or bool(released)
        return released


def partial_suffix(text: str, word: str) -> int:
    """Length of the longest proper beginning of `word` that `text` ends with."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
