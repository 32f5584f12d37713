"""Which prefill engines answer: after a failure a peer is left alone for a while, and its failure is said once, not once a request."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.engine.handoff.messages import HandoffError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
WRONG_PAUSE_S = 60.0
"""For a peer that can never serve us: another model, another run. Somebody may restart it with the right one, at the same address."""
REMEMBERED = 1024
OF_THE_REQUEST = frozenset({"version", "short", "busy"})
"""Failures that say nothing about the next request to the same peer."""
OF_THE_SET_UP = frozenset({"token", "layout", "weights", "request", "memory"})


@dataclass(slots=True)
class _Peer:
    failures: int = 0
    retry_at: float = 0.0


class Peers:
    """Used by the threads that fetch and by the engine's; every method is short."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures: Counter[str] = Counter()
        """By code, since the start."""
        self._clock = clock
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._lock = threading.Lock()

    def may_ask(self, address: str) -> bool:
        with self._lock:
            peer = self._peers.get(address)
            return peer is None or self._clock() >= peer.retry_at

    @property
    def away(self) -> int:
        """Peers that are being left alone now."""
        with self._lock:
            return sum(self._clock() < peer.retry_at for peer in self._peers.values())

    def succeeded(self, address: str) -> None:
        with self._lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            log.info("prefill engine %s serves again", address)

    def failed(self, address: str, error: HandoffError) -> None:
        """Count it, and leave the peer alone unless only the request was at fault."""
        with self._lock:
            self.failures[error.code] += 1
            if error.code in OF_THE_REQUEST:
                return
            peer = self._peers.setdefault(address, _Peer())
            peer.failures += 1
            backoff_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (peer.failures - 1))
            peer.retry_at = self._clock() + (WRONG_PAUSE_S if error.code in OF_THE_SET_UP else backoff_s)
            first = peer.failures == 1
            if len(self._peers) > REMEMBERED:
                self._peers.popitem(last=False)
        if first:
            level = logging.ERROR if error.code in OF_THE_SET_UP else logging.WARNING
            log.log(level, "prefill engine %s: %s; prompts are computed here until it serves again", address, error)
