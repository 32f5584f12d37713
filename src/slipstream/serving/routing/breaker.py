"""A circuit breaker: a replica that fails again and again gets no requests for a while, then one, which decides.

    closed --(failures in a row)--> open --(time)--> half open --(its one request succeeds)--> closed
                                      ^------------------(it fails: twice as long)----------------'

The caller brings the time. Failures that arrive while the replica is known to be down are one incident: the caller counts them once.
"""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Of one replica."""

    def __init__(self, failures: int, open_s: float, most_s: float):
        """Opens after `failures` in a row for `open_s`, then twice as long each time, at most `most_s`."""
        self._failures, self._open_s, self._most_s = failures, open_s, most_s
        self.reset()

    def reset(self) -> None:
        """Closed, with nothing held against it: another process."""
        self.opened = 0
        """Times in a row that it has opened."""
        self._in_a_row = 0
        self._until_s: float | None = None
        self._probing = False

    def state(self, now: float) -> BreakerState:
        if self._until_s is None:
            return "closed"
        return "open" if now < self._until_s else "half_open"

    def allows(self, now: float) -> bool:
        """Whether a request may go there: always, never, or one at a time."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._probing)

    def opens_in(self, now: float) -> float | None:
        """Seconds until a request may be tried; None when that is not a matter of time."""
        return self._until_s - now if self._until_s is not None and now < self._until_s else None

    def sent(self, now: float) -> bool:
        """A request that was allowed goes there. Returns whether it is the one that decides."""
        self._probing = probe = self.state(now) == "half_open"
        return probe

    def ended(self, probe: bool, ok: bool | None, now: float) -> None:
        """A request ended: answered, failed (one call for an incident), or neither (its caller went away, the replica was full)."""
        if probe:
            self._probing = False
        if ok:
            self._in_a_row = 0
            if probe:
                self.reset()
        elif ok is False:
            self._in_a_row += 1
            if probe or (self._in_a_row >= self._failures and self.state(now) == "closed"):
                self.trip(now)

    def trip(self, now: float) -> None:
        """Open now, whatever was counted."""
        self._until_s = now + min(self._most_s, self._open_s * 2.0**self.opened)
        self.opened += 1
