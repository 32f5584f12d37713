"""Whose KV may be used once a policy version is live: KV that is not too old, and that no other policy with the same number wrote.

Numbers come again: after a rollback to version 6 the trainer makes another version 7. What the first 7 wrote, and every version after it,
belongs to a policy that is gone. So the weights behind each number are remembered, and a number that was live with others, or that is not
remembered though a later one is, counts as taken by another policy.
"""

from __future__ import annotations

from slipstream.engine.scheduler import ANY_VERSION, Scheduler
from slipstream.engine.tiers.hierarchy import Tiers

REMEMBERED = 1000
"""Where KV may have any age: tiers give back none that is more versions old than this."""


class UsableVersions:
    """Tells the scheduler, which drops what is on the device, and the tiers, which find no more of it."""

    def __init__(self, scheduler: Scheduler, tiers: Tiers | None, max_age: int | None) -> None:
        """`max_age`: most versions between the live one and one that wrote KV in use; None: no bound."""
        self._scheduler, self._tiers, self._max_age = scheduler, tiers, max_age
        self._weights: dict[int, bytes] = {}
        """Fingerprint of each version that was live and whose KV may still be asked for."""

    def set_live(self, number: int, fingerprint: str) -> None:
        """This version is live now. Running sequences that hold KV which may not be used any more wait, to be computed again."""
        weights, known = bytes.fromhex(fingerprint), self._weights
        taken = number <= max(known, default=number - 1) and known.get(number) != weights
        if taken:
            self._scheduler.expire(range(-1, number))
            known = {earlier: its for earlier, its in known.items() if earlier < number}
        if self._max_age is not None:
            self._scheduler.expire(range(number - self._max_age, number + 1))
        elif taken:
            self._scheduler.expire(ANY_VERSION)
        oldest = number - (REMEMBERED if self._max_age is None else self._max_age)
        self._weights = {one: its for one, its in {**known, number: weights}.items() if one >= oldest}
        if self._tiers is not None:
            self._tiers.use(self._scheduler.versions, self._weights)
