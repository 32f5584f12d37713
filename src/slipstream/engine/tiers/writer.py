"""The way down: one thread that writes queued blocks to the first tier below RAM, and what that has no room for to the next."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from slipstream.engine.blocks import Label
from slipstream.engine.tiers.contents import DISK, SHARED, Contents
from slipstream.engine.tiers.index import Place, by_name, key_of
from slipstream.errors import WireError


class Writer:
    """`run` in a thread of its own; the engine's thread calls `push` and `close`."""

    def __init__(self, contents: Contents, shape: bytes, queue_blocks: int, scan_s: float) -> None:
        """`shape`: of the blocks. `queue_blocks`: most that wait to be written. `scan_s`: between two looks at the shared folder."""
        self.queue_blocks = queue_blocks
        self.written: OrderedDict[bytes, None] = OrderedDict()
        """What this engine has put into the shared folder, least recently used first: when that is full, the first to go."""
        self.scan_at = 0.0
        """When the next look at the shared folder is due."""
        self._contents, self._shape, self._scan_s = contents, shape, scan_s
        self._work = threading.Condition(contents.lock)
        self._closing = False

    def push(self, key: bytes, place: Place, read: Callable[[], np.ndarray]) -> None:
        """Queue a block whose payload `read` gives, or drop it, counted, where there is no room. Under the lock; never waits."""
        contents = self._contents
        if not contents.stores:
            return
        if len(contents.queue) < self.queue_blocks and contents.health[self._first].may_try():
            contents.queue[key] = (place, read())
            self._work.notify()
        else:
            contents.counts["dropped"] += 1

    def touch(self, key: bytes) -> None:
        """Used in the shared folder now. Under the lock."""
        if key in self.written:
            self.written.move_to_end(key)

    def close(self) -> None:
        """`run` ends once the queue is empty."""
        with self._contents.lock:
            self._closing = True
            self._work.notify()

    def run(self) -> None:
        contents = self._contents
        while True:
            if SHARED in contents.stores and time.monotonic() >= self.scan_at:
                self.look()
            with contents.lock:
                if not contents.queue and not self._closing:
                    self._work.wait(self._scan_s if SHARED in contents.stores else None)
                if self._closing and not contents.queue:
                    return
                item = next(iter(contents.queue.items()), None)
            if item is not None:
                key, (place, payload) = item
                self._put(self._first, key, place, payload)
                with contents.lock:
                    if contents.queue.get(key, (None,))[0] == place:
                        del contents.queue[key]

    def look(self) -> None:
        """See what other engines have put into the shared folder and taken from it."""
        contents = self._contents
        self.scan_at = time.monotonic() + self._scan_s
        try:
            found = contents.stores[SHARED].scan()
        except OSError as error:
            contents.health[SHARED].failed(error)
            return
        with contents.lock:
            contents.tiers[SHARED].merge(names := by_name(found, contents.is_ours))
            self.written = OrderedDict((key, None) for key in self.written if key in names)

    @property
    def _first(self) -> str:
        return next(iter(self._contents.stores))

    def _put(self, name: str, key: bytes, place: Place, payload: np.ndarray) -> None:
        """Write a block to this tier, and what it has no room for then to the next."""
        contents = self._contents
        tier, store, health = contents.tiers[name], contents.stores[name], contents.health[name]
        weights = contents.weights.get(place.version)
        with contents.lock:
            if weights is None or tier.get(key) == place or not health.may_try():
                return
        try:
            self._make_room(name)
            store.write(Label(key, self._shape, weights), place.version, payload)
        except OSError as error:
            with contents.lock:
                contents.counts["dropped"] += 1
            health.failed(error)
            return
        health.worked()
        with contents.lock:
            old = tier.get(key)
            if name == SHARED and old is not None:  # another engine may have put it there, or need it yet
                own, aside = key in self.written, tier.put_aside(key)
                if own:
                    self.written[aside] = None
            tier.put(key, place)
            if name == SHARED:
                self.written[key] = None
            contents.counts[f"{name}/written_bytes"] += payload.nbytes
        if old is not None and name == DISK:
            store.remove(key, old)

    def _make_room(self, name: str) -> None:
        """Take blocks from a full tier until one more fits; they are found here until they lie in the next. Raises OSError."""
        contents = self._contents
        tier, store = contents.tiers[name], contents.stores[name]
        while True:
            with contents.lock:
                if len(tier) < tier.capacity:
                    return
                own = next((key for key in self.written if tier.get(key) is not None), None) if name == SHARED else None
                victim, place = tier.oldest(own)
            if name == DISK and SHARED in contents.stores and contents.is_ours(place):
                self._demote(key_of(victim), place)
            with contents.lock:
                tier.evict(victim)
                self.written.pop(victim, None)
            store.remove(key_of(victim), place)

    def _demote(self, key: bytes, place: Place) -> None:
        """From the disk to the shared folder."""
        try:
            payload = self._contents.stores[DISK].read(key, place)
        except (OSError, WireError) as error:
            self._contents.note_bad(DISK, key, place, error)
            return
        self._put(SHARED, key, place, payload)
