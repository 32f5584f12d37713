"""What a gateway counts, since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FORKS = ("branched", "rewritten")


@dataclass
class Counts:
    """Mutable; shared by a gateway and its sessions."""

    opened: int = 0
    turns: int = 0
    tokens: int = 0
    """Sampled and recorded."""
    lost_tokens: int = 0
    """Streamed to calls that were given up: in no turn."""
    overridden: int = 0
    """Calls that asked for another sampling than their session's contract."""
    forks: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    streams: list[int] = field(default_factory=lambda: [0])
    """[open now]"""

    def metrics(self, sessions: int) -> dict[str, float]:
        """Every gateway metric, now; `sessions` are open."""
        return {
            "gateway/sessions/open": sessions,
            "gateway/sessions/opened": self.opened,
            "gateway/turns/count": self.turns,
            "gateway/tokens/recorded": self.tokens,
            "gateway/tokens/lost": self.lost_tokens,
            "gateway/sampling/overridden": self.overridden,
            "gateway/streams/open": self.streams[0],
            **{f"gateway/forks/{kind}": self.forks[kind] for kind in FORKS},
            **{f"gateway/errors/{kind}": count for kind, count in self.errors.items()},
        }
