"""Policies: from a session and a snapshot of the replicas that may take a request to one of them.

    round_robin       in turn
    least_loaded      fewest requests in flight
    two_choices       the less loaded of two drawn at random (Mitzenmacher 2001: nearly as even as looking at all)
    consistent_hash   highest random weight of (session, replica): one that goes moves its own sessions only (Thaler, Ravishankar 1998)
    kv_aware          least cost, in prompt tokens to compute: what it does not hold of this prompt, and what it has to do already

Each is a small object with `choose`; what it keeps between calls (a counter, a generator) is its own. None knows a clock or a connection.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from slipstream.config.router import RouterConfig, RouterWeights


@dataclass(frozen=True, slots=True)
class View:
    """One replica at the moment of a decision."""

    name: str
    requests: int = 0
    """In flight from this router."""
    pending: float = 0.0
    """Prompt tokens sent and presumably not computed yet."""
    held: int = 0
    """Leading prompt tokens that it presumably has in its KV cache."""
    waiting: int = 0
    resident_frac: float = 0.0
    """What the contexts of its sessions take of its KV cache; above 1 when they do not fit."""
    kv_used_frac: float = 0.0
    behind: int = 0
    """Policy versions behind the newest."""
    home: bool = False
    """It served this session last."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Index into the views, and why it was taken."""

    index: int
    reason: str


class Policy(Protocol):
    """`views` is never empty."""

    def choose(self, session: str, prompt_tokens: int, views: Sequence[View]) -> Choice: ...


class RoundRobin:
    """In turn, by name: replicas that come and go do not disturb the order of the others."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, session: str, prompt_tokens: int, views: Sequence[View]) -> Choice:
        index = min(range(len(views)), key=lambda i: (views[i].name <= self._last, views[i].name))
        self._last = views[index].name
        return Choice(index, "turn")


class LeastLoaded:
    """Fewest requests in flight; of equals, the first."""

    def choose(self, session: str, prompt_tokens: int, views: Sequence[View]) -> Choice:
        return Choice(min(range(len(views)), key=lambda i: views[i].requests), "load")


class TwoChoices:
    """The less loaded of two drawn at random."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def choose(self, session: str, prompt_tokens: int, views: Sequence[View]) -> Choice:
        drawn = self._random.sample(range(len(views)), min(2, len(views)))
        return Choice(min(drawn, key=lambda i: views[i].requests), "load")


class ConsistentHash:
    """Highest random weight: the same session goes to the same replica while that one is there."""

    def choose(self, session: str, prompt_tokens: int, views: Sequence[View]) -> Choice:
        weights = [xxhash.xxh3_64_intdigest(f"{session}\0{view.name}".encode()) for view in views]
        return Choice(max(range(len(views)), key=weights.__getitem__), "hash")


class KvAware:
    """Least cost. Of equals the one with fewer requests, then the first."""

    def __init__(self, weights: RouterWeights):
        self._weights = weights

    def choose(self, session: str, prompt_tokens: int, views: Sequence[View]) -> Choice:
        costs = [(self.cost(prompt_tokens, view), view.requests) for view in views]
        index = min(range(len(views)), key=costs.__getitem__)
        most = max(view.held for view in views)
        reason = "cold" if most == 0 else "prefix" if views[index].held == most else "load"
        return Choice(index, reason)

    def cost(self, prompt_tokens: int, view: View) -> float:
        """In prompt tokens to compute."""
        w = self._weights
        return (
            w.prefix * (prompt_tokens - view.held)
            + w.pending * view.pending
            + w.requests * view.requests
            + w.waiting * view.waiting
            + w.resident * view.resident_frac
            + w.kv * view.kv_used_frac
            + w.behind * view.behind
            - w.stay * view.home
        )


def make_policy(config: RouterConfig) -> Policy:
    """The policy that the configuration names."""
    match config.policy:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "two_choices":
            return TwoChoices(config.seed)
        case "consistent_hash":
            return ConsistentHash()
        case "kv_aware":
            return KvAware(config.weights)
