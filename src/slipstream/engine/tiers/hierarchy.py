"""Tiered KV: device -> RAM -> local disk -> shared folder, as one block source with one index.

Down: a block that the device reclaims is copied to RAM at that moment, before it is overwritten. What RAM has no room for goes into a
bounded queue, from which one thread writes it to the next tier; what that has no room for goes one tier further, or is forgotten. When
writing cannot keep up, blocks are dropped and counted: a step never waits. A block that lies in a lower tier already is not written again.

Up: `find` walks the keys until the first that no tier has (with weights and versions that may be used here); a reader thread loads those on
disk or in the shared folder, those in RAM are there at once. What is missing, damaged or another's is forgotten and counted, and computed.

A store that fails is left alone for RETRY_S, with one line in the log, and generation goes on without it.

Called by the engine's thread; the two threads touch the index under `_lock` and never the device.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from slipstream.config.tiers import TiersConfig
from slipstream.engine.blocks import HEADER_BYTES, Blocks, Label, version_of
from slipstream.engine.room import MIB
from slipstream.engine.tiers.fetch import TierFetch, Work
from slipstream.engine.tiers.health import Health
from slipstream.engine.tiers.index import Place, Tier, by_name, key_of
from slipstream.engine.tiers.store import BlockStore, FolderStore, claim_folder
from slipstream.errors import ConfigError, WireError
from slipstream.types import GenerateRequest

log = logging.getLogger(__name__)

RAM, DISK, SHARED = "ram", "disk", "shared"
CLOSE_S = 2.0
"""What is in the queue when the engine stops has this long to be written."""


class Tiers:
    """A `BlockSource`. `close` ends its threads."""

    def __init__(self, config: TiersConfig, blocks: Blocks, stores: Mapping[str, BlockStore] | None = None) -> None:
        """`stores` for the lower tiers in place of folders. Raises ConfigError when a configured folder cannot be used."""
        self.timeout_s = config.fetch_timeout_s
        self.weights: dict[int, bytes] = {}
        """Fingerprint of the weights of each version that was live here."""
        self.versions = range(-1, 1 << 31)
        """Whose KV may be used: see `Scheduler.versions`."""
        self.counts: Counter[str] = Counter()
        """See `values`."""
        self._config, self._blocks = config, blocks
        self._claim: int | None = None
        self._min_blocks = -(-config.min_tokens // blocks.block_tokens)
        self._stores = dict(stores) if stores is not None else self._open_folders()
        sizes = {RAM: config.ram_mib, DISK: config.disk_mib, SHARED: config.shared_mib}
        size = {RAM: blocks.block_bytes, DISK: blocks.block_bytes + HEADER_BYTES, SHARED: blocks.block_bytes + HEADER_BYTES}
        self.tiers = {name: _tier(name, mib, size[name]) for name, mib in sizes.items() if mib}
        self.health = {name: Health(name) for name in self._stores}
        self._ram: dict[bytes, np.ndarray] = {}
        self._queue: OrderedDict[bytes, tuple[Place, np.ndarray]] = OrderedDict()
        """On their way down, oldest first; they are found here meanwhile."""
        self._queue_blocks = max(1, config.queue_mib * MIB // blocks.block_bytes)
        self._wanted: deque[Work] = deque()
        self._written: OrderedDict[bytes, None] = OrderedDict()
        """What this engine has put into the shared folder, least recently used first: when that is full, the first to go."""
        self._lock = threading.RLock()
        self._to_read, self._to_write = threading.Condition(self._lock), threading.Condition(self._lock)
        self._closing = False
        self._scan_at = 0.0
        if DISK in self.tiers:
            self.tiers[DISK].load(by_name(self._stores[DISK].scan(), lambda place: False))
        self._threads = [threading.Thread(target=target, daemon=True, name=target.__name__) for target in (self._read_all, self._write_all)]
        for thread in self._threads if self._stores else ():
            thread.start()

    # ---- called by the engine's thread ----

    def save(self, key: bytes, block: int) -> None:
        """The device is about to overwrite this block."""
        version = int(self._blocks.version(block))
        weights = self.weights.get(version)
        if weights is None or version not in self.versions:
            return
        place = Place(version, weights[:8])
        with self._lock:
            if key in self._queue and self._queue[key][0] == place:
                return
            if RAM in self.tiers:
                tier = self.tiers[RAM]
                if tier.get(key) == place:
                    tier.touch(key)
                    return
                self._ram[key] = payload = self._blocks.read(block)
                tier.put(key, place)
                self.counts["ram/written_bytes"] += payload.nbytes
                while tier.over:
                    old, old_place = tier.oldest()
                    tier.evict(old)
                    self._down(old, old_place)
            elif self._lower_has(key, place):
                self._touch(self._first_store, key)
            elif self._has_queue_room():
                self._enqueue(key, place, self._blocks.read(block))

    def find(self, request: GenerateRequest, keys: Sequence[bytes]) -> int:
        found: Counter[str] = Counter()
        with self._lock:
            for key in keys:
                name = self._where(key)
                if name is None:
                    break
                found[name] += 1
        missing = len(keys)
        for name in self.tiers:
            missing -= found[name]
            self.counts[f"{name}/miss_tokens"] += missing * self._blocks.block_tokens
        count = sum(found.values())
        return count if count >= self._min_blocks else 0

    def start(self, request: GenerateRequest, keys: Sequence[bytes], wake: Callable[[], None]) -> TierFetch:
        """What is in RAM is there at once; the rest becomes work for the reader."""
        work = Work(fetch := TierFetch(self._blocks, len(keys), wake, self.counts))
        fetch.late_after(self.timeout_s, lambda: self._late(work))
        with self._lock:
            for i, key in enumerate(keys):
                name = self._where(key)
                if name is None:
                    fetch.limit = i
                    break
                if name != RAM:
                    place = self.tiers[name].get(key)
                    assert place is not None
                    work.items.append((i, key, name, place))
                else:
                    fetch.deliver(i, self._in_ram(key), RAM)
                self._touch(name, key)
            if work.items:
                self._wanted.append(work)
                self._to_read.notify()
            else:
                fetch.done = True
        return fetch

    def values(self) -> dict[str, float]:
        """Metrics."""
        with self._lock:
            counts, mib = self.counts, self._blocks.block_bytes / MIB
            values = {"engine/tiers/queue_mib": len(self._queue) * mib, "engine/tiers/dropped": float(counts["dropped"])}
            for name, tier in self.tiers.items():
                values |= {
                    f"engine/tiers/{name}/hit_tokens": float(counts[f"{name}/hit_tokens"]),
                    f"engine/tiers/{name}/miss_tokens": float(counts[f"{name}/miss_tokens"]),
                    f"engine/tiers/{name}/read_mib": counts[f"{name}/read_bytes"] / MIB,
                    f"engine/tiers/{name}/written_mib": counts[f"{name}/written_bytes"] / MIB,
                    f"engine/tiers/{name}/used_mib": tier.used_bytes / MIB,
                    f"engine/tiers/{name}/evicted": float(tier.evicted),
                    f"engine/tiers/{name}/damaged": float(counts[f"{name}/damaged"]),
                    f"engine/tiers/{name}/on": float(name not in self.health or self.health[name].ok),
                }
        return values

    def close(self) -> None:
        """Write what is queued, for CLOSE_S at most, and end the threads."""
        with self._lock:
            self._closing = True
            self._to_read.notify()
            self._to_write.notify()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_S)
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def flush(self, timeout_s: float = 240.0) -> bool:
        """Wait until everything queued is written; for tests and benchmarks."""
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            with self._lock:
                if not self._queue:
                    return True
            time.sleep(0.005)
        return False

    # ---- the index, under the lock ----

    @property
    def _first_store(self) -> str:
        return next(iter(self._stores))

    def _where(self, key: bytes) -> str | None:
        """The nearest tier that has this key, with content that may be used here."""
        if key in self._queue and self._is_ours(self._queue[key][0]):
            return RAM
        for name, tier in self.tiers.items():
            place = tier.get(key)
            if place is not None and self._is_ours(place) and (name == RAM or self.health[name].may_try()):
                return name
        return None

    def _in_ram(self, key: bytes) -> np.ndarray:
        """The payload of a key that `_where` has found here."""
        place, payload = self._queue.get(key, (None, None))
        return payload if payload is not None and place is not None and self._is_ours(place) else self._ram[key]

    def _is_ours(self, place: Place) -> bool:
        weights = self.weights.get(place.version)
        return weights is not None and weights[:8] == place.weights and place.version in self.versions

    def _touch(self, name: str, key: bytes) -> None:
        """Used now."""
        if name in self.tiers and self.tiers[name].get(key) is not None:
            self.tiers[name].touch(key)
        if name == SHARED and key in self._written:
            self._written.move_to_end(key)

    def _late(self, work: Work) -> None:
        """The deadline passed before the reader was through."""
        for name in {name for _, _, name, _ in work.items}:
            self.health[name].failed(TimeoutError(f"blocks did not come within engine.tiers.fetch_timeout_s = {self.timeout_s:g}"))

    def _lower_has(self, key: bytes, place: Place) -> bool:
        return any(self.tiers[name].get(key) == place for name in self._stores)

    def _down(self, key: bytes, place: Place) -> None:
        """RAM has no room for this block any more."""
        payload = self._ram.pop(key)
        if self._stores and not self._lower_has(key, place) and self._has_queue_room():
            self._enqueue(key, place, payload)

    def _has_queue_room(self) -> bool:
        if not self._stores:
            return False
        room = len(self._queue) < self._queue_blocks and self.health[self._first_store].may_try()
        self.counts["dropped"] += not room
        return room

    def _enqueue(self, key: bytes, place: Place, payload: np.ndarray) -> None:
        self._queue[key] = (place, payload)
        self._to_write.notify()

    # ---- the writer ----

    def _write_all(self) -> None:
        while True:
            if SHARED in self._stores and time.monotonic() >= self._scan_at:
                self.look()
            with self._lock:
                if not self._queue and not self._closing:
                    self._to_write.wait(self._config.scan_s if SHARED in self._stores else None)
                if self._closing and not self._queue:
                    return
                item = next(iter(self._queue.items()), None)
            if item is not None:
                key, (place, payload) = item
                self._put(self._first_store, key, place, payload)
                with self._lock:
                    if self._queue.get(key, (None,))[0] == place:
                        del self._queue[key]

    def look(self) -> None:
        """See what other engines have put into the shared folder and taken from it."""
        self._scan_at = time.monotonic() + self._config.scan_s
        try:
            found = self._stores[SHARED].scan()
        except OSError as error:
            self.health[SHARED].failed(error)
            return
        with self._lock:
            self.tiers[SHARED].merge(names := by_name(found, self._is_ours))
            self._written = OrderedDict((key, None) for key in self._written if key in names)

    def _put(self, name: str, key: bytes, place: Place, payload: np.ndarray) -> None:
        """Write a block to this tier, and what it has no room for then to the next."""
        tier, store, health = self.tiers[name], self._stores[name], self.health[name]
        weights = self.weights.get(place.version)
        with self._lock:
            if weights is None or tier.get(key) == place or not health.may_try():
                return
        try:
            self._make_room(name)
            store.write(Label(key, self._blocks.shape, weights), place.version, payload)
        except OSError as error:
            with self._lock:
                self.counts["dropped"] += 1
            health.failed(error)
            return
        health.worked()
        with self._lock:
            old = tier.get(key)
            tier.put(key, place)
            if name == SHARED:
                self._written[key] = None
            self.counts[f"{name}/written_bytes"] += payload.nbytes
        if old is not None and name == DISK:
            store.remove(key, old)

    def _make_room(self, name: str) -> None:
        """Take blocks from a full tier until one more fits; they are found here until they lie in the next. Raises OSError."""
        tier, store = self.tiers[name], self._stores[name]
        while True:
            with self._lock:
                if len(tier) < tier.capacity:
                    return
                own = next((key for key in self._written if tier.get(key) is not None), None) if name == SHARED else None
                victim, place = tier.oldest(own)
            if name == DISK and SHARED in self._stores and self._is_ours(place):
                self._demote(key_of(victim), place)
            with self._lock:
                tier.evict(victim)
                self._written.pop(victim, None)
            store.remove(key_of(victim), place)

    def _demote(self, key: bytes, place: Place) -> None:
        """From the disk to the shared folder."""
        try:
            payload = self._stores[DISK].read(key, place)
        except (OSError, WireError) as error:
            self._note_bad(DISK, key, place, error)
            return
        self._put(SHARED, key, place, payload)

    # ---- the reader ----

    def _read_all(self) -> None:
        while True:
            with self._lock:
                while not self._wanted and not self._closing:
                    self._to_read.wait()
                if self._closing:
                    return
                work = self._wanted.popleft()
            self._read(work)

    def _read(self, work: Work) -> None:
        """In order, up to the first that is not there: what follows it would be of no use."""
        for i, key, name, place in work.items:
            if work.fetch.cancelled:
                break
            payload = self._load(name, key, place)
            if payload is None:
                payload, name = self._find_again(key)
            if payload is None:
                work.fetch.limit = i
                break
            work.fetch.deliver(i, payload, name)
        work.fetch.finish()

    def _find_again(self, key: bytes) -> tuple[np.ndarray | None, str]:
        """A block that was not where it should be: it may have moved to another tier since."""
        with self._lock:
            name = self._where(key)
            if name == RAM:
                return self._in_ram(key), RAM
            place = self.tiers[name].get(key) if name is not None else None
        return (self._load(name, key, place), name) if name is not None and place is not None else (None, "")

    def _load(self, name: str, key: bytes, place: Place) -> np.ndarray | None:
        try:
            payload = self._stores[name].read(key, place)
            if version_of(payload) != place.version:
                raise WireError(f"KV block {key.hex()} was written by version {version_of(payload)}; its name says {place.version}")
        except (OSError, WireError) as error:
            self._note_bad(name, key, place, error)
            return None
        self.health[name].worked()
        return payload

    def _note_bad(self, name: str, key: bytes, place: Place, error: Exception) -> None:
        """Forget a block that cannot be read, and remove it so that it can be written again."""
        with self._lock:
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
            self._stores[name].remove(key, place)
        except OSError as failure:
            self.health[name].failed(failure)

    def _open_folders(self) -> dict[str, BlockStore]:
        stores: dict[str, BlockStore] = {}
        config, shape, size = self._config, self._blocks.shape, self._blocks.block_bytes
        if config.disk_path is not None:
            path, self._claim = claim_folder(config.disk_path)
            stores[DISK] = _open(DISK, path, shape, size)
        if config.shared_path is not None:
            stores[SHARED] = _open(SHARED, config.shared_path, shape, size)
        return stores


def _tier(name: str, mib: int, block_bytes: int) -> Tier:
    if mib * MIB < block_bytes:
        raise ConfigError(f"engine.tiers.{name}_mib = {mib} holds no block of {block_bytes / MIB:.2f} MiB: raise it, or 0 to leave it out")
    return Tier(name, mib * MIB, block_bytes)


def _open(name: str, path: Path, shape: bytes, block_bytes: int) -> FolderStore:
    try:
        return FolderStore(path, shape, block_bytes, private=name == DISK)
    except OSError as error:
        raise ConfigError(f"engine.tiers.{name}_path = {str(path)!r} cannot be used: {error.strerror or error}") from None
