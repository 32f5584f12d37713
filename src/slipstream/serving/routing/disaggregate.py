"""Whether a prompt is prefilled by another engine than the one that decodes it, and by which: arithmetic on what the router knows.

A long prefill costs where it happens: in the engine that decodes, every running request stands still for as long; in a prefill engine,
only the requests in its queue wait. So both ways are priced in seconds that requests lose, summed over the requests, and the cheaper one is
taken. Rates are those that answers have shown; that of a prefill engine is end to end, the way of the blocks included.

Pure: no clock, no connection. Whether the prefill engine answers is the decode engine's business, which computes what does not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slipstream.serving.routing.load import Load
from slipstream.types import Completion

When = Literal["worth_it", "always"]
OVERHEAD_S = 0.005
"""Of one handoff, however short: two round trips, and up to a step of each engine until it looks."""
NOMINAL_RATE = 1000.0
"""Prompt tokens a second where no answer has shown any."""


@dataclass(frozen=True, slots=True)
class Side:
    """An engine that might prefill."""

    pending: float
    """Prompt tokens in front of this one."""
    rate: float
    """Prompt tokens a second; 0: not known."""
    others: int = 0
    """Requests that would stand still meanwhile."""


def worth_it(tokens: int, here: Side, there: Side) -> bool:
    """Whether `tokens` uncached prompt tokens cost less when they are prefilled `there`."""
    here_rate = here.rate or there.rate or NOMINAL_RATE
    there_rate = there.rate or here_rate
    lost_here_s = (here.pending + tokens * (1 + here.others)) / here_rate
    lost_there_s = (there.pending + tokens) / there_rate + OVERHEAD_S
    return lost_there_s < lost_here_s


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A prompt on its way to a prefill engine."""

    name: str
    address: str
    tokens: int
    place: int
    was_idle: bool


class Prefills:
    """The prefill engines as the router sees them. `counts`: prompts and tokens sent `there`, `came` tokens, prompts left `here`."""

    def __init__(self, when: When) -> None:
        self._when = when
        self._loads: dict[str, Load] = {}
        self.counts: Counter[str] = Counter()

    def choose(self, tokens: int, here: Side, peers: Mapping[str, str], now: float) -> Elsewhere | None:
        """Where `tokens` tokens (whole blocks that are not cached `here`) are prefilled; None: here. `peers`: name -> address."""
        if tokens <= 0 or not peers:
            return None
        name = min(peers, key=lambda peer: (self._load(peer).look(now), peer))
        load = self._load(name)
        pending = load.look(now)
        if self._when == "worth_it" and not worth_it(tokens, here, Side(pending, load.rate)):
            self.counts["here"] += 1
            return None
        self.counts.update(there=1, tokens=tokens)
        return Elsewhere(name, peers[name], tokens, load.sent(tokens, now), was_idle=pending == 0)

    def answered(self, sent: Elsewhere, completion: Completion, now: float) -> None:
        """Learn how fast it was, where it did not wait for others and all of it came."""
        came = completion.cached_by_tier.get("peer", 0)
        self.counts["came"] += came
        measured_s = completion.timings.queued_s if sent.was_idle and came >= sent.tokens else 0.0
        self._load(sent.name).answered(sent.place, came, measured_s, 0, 0.0, now)

    def ended(self, sent: Elsewhere) -> None:
        """However it ended."""
        self._load(sent.name).ended()

    def restarted(self, name: str) -> None:
        self._load(name).reset()

    def _load(self, name: str) -> Load:
        return self._loads.setdefault(name, Load())
