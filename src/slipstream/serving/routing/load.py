"""What the router has sent to one replica and how far that is: requests in flight, prompt tokens not computed yet, time for a token.

An engine computes prompts in order of arrival, so an answer says that everything sent before its request has been computed too. Between
answers the pending tokens drain at the rate that answers have shown. Durations only, of one clock each: the clocks of hosts may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

NEWEST = 0.2
"""Weight of the newest answer in the moving averages."""
ENOUGH_ANSWERS = 8
"""Answers before the time for a token says something about a replica."""
ENOUGH_TOKENS = 64
"""Prompt tokens that a prefill must have had for its rate to count."""


@dataclass(slots=True)
class Load:
    """Of one replica, as of the last `look`."""

    requests: int = 0
    pending: float = 0.0
    """Prompt tokens that were sent and are presumably not computed yet."""
    answers: int = 0
    _took_s: float = 0.0
    _sampled: float = 0.0
    _sent: int = 0
    _rate: float = 0.0
    """Prompt tokens a second; 0: not known yet."""
    _looked_s: float = 0.0

    @property
    def token_s(self) -> float:
        """The whole time of requests by their sampled tokens: moving averages of both, so that a short answer weighs little."""
        return self._took_s / self._sampled if self._sampled else 0.0

    @property
    def rate(self) -> float:
        """Prompt tokens a second, as answers have shown; 0: not known yet."""
        return self._rate

    def look(self, now: float) -> float:
        """The pending tokens now."""
        self.pending = max(0.0, self.pending - self._rate * (now - self._looked_s))
        self._looked_s = now
        return self.pending

    def sent(self, uncached: int, now: float) -> int:
        """One request more, with so many prompt tokens to compute. Returns its place, which `answered` wants back."""
        self.look(now)
        self.requests += 1
        self.pending += uncached
        self._sent += uncached
        return self._sent

    def ended(self) -> None:
        """One request less, however it ended."""
        self.requests -= 1
        if self.requests == 0:
            self.pending = 0.0

    def answered(self, place: int, computed: int, prefill_s: float, sampled: int, took_s: float, now: float) -> None:
        """The request at `place` came back: `computed` prompt tokens in `prefill_s`, `sampled` tokens, `took_s` seconds in all."""
        self.pending = min(self.look(now), self._sent - place)
        if computed >= ENOUGH_TOKENS and prefill_s > 0:
            self._rate = _moved(self._rate, computed / prefill_s)
        if sampled:
            self._took_s, self._sampled = _moved(self._took_s, took_s), _moved(self._sampled, sampled)
            self.answers += 1

    def reset(self) -> None:
        """Another process now: what is known of its speed is void; what is in flight is still in flight until it ends."""
        self.answers, self._took_s, self._sampled, self._rate, self.pending = 0, 0.0, 0.0, 0.0, 0.0


def _moved(average: float, value: float) -> float:
    return value if average == 0 else average + NEWEST * (value - average)
