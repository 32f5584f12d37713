"""How much a step takes on beside decoding: little at a time, so that those who decode go on evenly, and more the longer some is left."""

from __future__ import annotations

DOUBLES_AFTER = 8
"""Steps that were too short for what there was, until the next ones take on twice as much."""
MOST_DOUBLINGS = 20


class Pace:
    """Ask for the `limit`, say after each step whether it was in the way. What waits is done in the end however little `least` is: after
    64 such steps a step takes on 256 times as much."""

    def __init__(self, least: int) -> None:
        """`least` in the units of the caller, at least 1."""
        self._least = least
        self._short = 0

    @property
    def limit(self) -> int:
        """Most for this step."""
        return self._least << min(self._short // DOUBLES_AFTER, MOST_DOUBLINGS)

    def note(self, was_short: bool) -> None:
        """Whether the step left something undone because of the limit."""
        self._short = self._short + 1 if was_short else 0
