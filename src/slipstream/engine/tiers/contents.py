"""What lies in which tier, and whose it is: the state that the engine's thread, the writer and the reader share, under one lock.

Methods that say so must be called with `lock` held. Nobody touches the device here.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping

import numpy as np

from slipstream.engine.tiers.health import Health
from slipstream.engine.tiers.index import Place, Tier
from slipstream.engine.tiers.store import BlockStore

log = logging.getLogger(__name__)

RAM, DISK, SHARED = "ram", "disk", "shared"


class Contents:
    """Of the tiers of one engine, the nearest first."""

    def __init__(self, tiers: Mapping[str, Tier], stores: Mapping[str, BlockStore]) -> None:
        """`stores`: of every tier but RAM."""
        self.lock = threading.RLock()
        self.tiers, self.stores = tiers, stores
        self.health = {name: Health(name) for name in stores}
        self.ram: dict[bytes, np.ndarray] = {}
        self.queue: OrderedDict[bytes, tuple[Place, np.ndarray]] = OrderedDict()
        """On their way down, oldest first; they are found here meanwhile."""
        self.counts: Counter[str] = Counter()
        """See `Tiers.values`."""
        self.weights: Mapping[int, bytes] = {}
        """Fingerprint of the weights of each version whose KV may be used."""
        self.versions = range(-1, 1 << 31)
        """Whose KV may be used: see `Scheduler.versions`."""

    def is_ours(self, place: Place) -> bool:
        """Whether it may be used here, now."""
        weights = self.weights.get(place.version)
        return weights is not None and weights[:8] == place.weights and place.version in self.versions

    def where(self, key: bytes) -> str | None:
        """The nearest tier that has this key, with content that may be used here. Under the lock."""
        if key in self.queue and self.is_ours(self.queue[key][0]):
            return RAM
        for name, tier in self.tiers.items():
            place = tier.get(key)
            if place is not None and self.is_ours(place) and (name == RAM or self.health[name].may_try()):
                return name
        return None

    def in_ram(self, key: bytes) -> np.ndarray:
        """The payload of a key that `where` has found in RAM. Under the lock."""
        place, payload = self.queue.get(key, (None, None))
        return payload if payload is not None and place is not None and self.is_ours(place) else self.ram[key]

    def lower_has(self, key: bytes, place: Place) -> bool:
        """Under the lock."""
        return any(self.tiers[name].get(key) == place for name in self.stores)

    def note_bad(self, name: str, key: bytes, place: Place, error: Exception) -> None:
        """Forget a block that cannot be read, and remove it so that it can be written again."""
        with self.lock:
            if self.tiers[name].get(key) == place:
                self.tiers[name].drop(key)
            if not isinstance(error, FileNotFoundError):
                self.counts[f"{name}/damaged"] += 1
        if isinstance(error, FileNotFoundError):
            return  # another engine made room, or somebody deleted it
        if isinstance(error, OSError):
            self.health[name].failed(error)
            return
        log.warning("%s tier: %s; it is computed again", name, error)
        try:
            self.stores[name].remove(key, place)
        except OSError as failure:
            self.health[name].failed(failure)
