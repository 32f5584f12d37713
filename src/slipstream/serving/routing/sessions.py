"""Where each session went last, and how much KV the sessions of a replica will want again.

A session that has not been heard of for a while no longer counts as resident, but its home is remembered for as long as there is room.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass

REMEMBERED = 65536
IDLE_S = 60.0
"""After this long without a turn a session is presumed to be over, or its KV not worth keeping."""


@dataclass(frozen=True, slots=True)
class _Resident:
    replica: str
    shared: int
    """Tokens of its context that others had there before it."""
    tokens: int
    """The rest."""
    used_s: float


class Sessions:
    """Times are the caller's."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._active: OrderedDict[str, _Resident] = OrderedDict()
        self._tokens: defaultdict[str, int] = defaultdict(int)

    def home(self, session: str) -> str | None:
        """The replica that got its last request."""
        return self._homes.get(session)

    def residents(self, but: str) -> dict[str, int]:
        """Replica -> tokens of context of the active sessions there, without the session `but` and without what sessions share."""
        tokens = dict(self._tokens)
        if (own := self._active.get(but)) is not None:
            tokens[own.replica] -= own.tokens
        return tokens

    def placed(self, session: str, replica: str, context: int, held: int, now: float) -> None:
        """Its next request, with `context` tokens of which the replica has `held`, goes there."""
        before = self._active.get(session)
        shared = before.shared if before is not None and before.replica == replica else held
        self._leave(session)
        self._active[session] = _Resident(replica, shared, max(0, context - shared), now)
        self._tokens[replica] += max(0, context - shared)
        self._homes[session] = replica
        self._homes.move_to_end(session)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        self._expire(now)

    def forget(self, replica: str) -> None:
        """Its cache is empty: nobody is resident. Sessions still have their home there."""
        for session in [name for name, resident in self._active.items() if resident.replica == replica]:
            self._leave(session)

    def _expire(self, now: float) -> None:
        while self._active:
            session, resident = next(iter(self._active.items()))
            if now - resident.used_s < IDLE_S:
                return
            self._leave(session)

    def _leave(self, session: str) -> None:
        if (resident := self._active.pop(session, None)) is not None:
            self._tokens[resident.replica] -= resident.tokens
