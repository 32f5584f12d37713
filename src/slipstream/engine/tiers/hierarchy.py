"""Tiered KV: device -> RAM -> local disk -> shared folder, as one block source with one index.

Down: a block that the device reclaims is copied to RAM at that moment, before it is overwritten. What RAM has no room for goes into a
bounded queue, from which one thread writes it to the next tier (`writer`); what that has no room for goes one tier further, or is
forgotten. When writing cannot keep up, blocks are dropped and counted: a step never waits. A block that lies in a lower tier already is not
written again.

Up: `find` walks the keys until the first that no tier has (with weights and versions that may be used here); a thread loads those on disk
or in the shared folder (`reader`), those in RAM are there at once. What is missing, damaged or another's is forgotten and counted, and
computed.

A store that fails is left alone for RETRY_S, with one line in the log, and generation goes on without it (`health`).

Called by the engine's thread; the two threads share `contents` with it and never touch the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slipstream.config.tiers import TiersConfig
from slipstream.engine.blocks import Blocks
from slipstream.engine.room import HEADER_BYTES, MIB
from slipstream.engine.tiers.contents import DISK, RAM, SHARED, Contents
from slipstream.engine.tiers.fetch import TierFetch, Work
from slipstream.engine.tiers.fit import check_sizes
from slipstream.engine.tiers.index import Place, Tier, by_name
from slipstream.engine.tiers.reader import Reader
from slipstream.engine.tiers.store import BlockStore, FolderStore, claim_folder
from slipstream.engine.tiers.writer import Writer
from slipstream.errors import ConfigError
from slipstream.types import GenerateRequest

CLOSE_S = 2.0
"""What is in the queue when the engine stops has this long to be written."""


class Tiers:
    """A `BlockSource`. `close` ends its threads."""

    def __init__(self, config: TiersConfig, blocks: Blocks, stores: Mapping[str, BlockStore] | None = None) -> None:
        """`stores` for the lower tiers in place of folders. Raises ConfigError when a configured folder cannot be used."""
        self.timeout_s, self.brings_tails = config.fetch_timeout_s, False
        check_sizes(config, blocks.block_bytes)
        self._blocks = blocks
        self._claim: int | None = None
        self._min_blocks = -(-config.min_tokens // blocks.block_tokens)
        found = stores if stores is not None else self._open_folders(config)
        sizes = {RAM: config.ram_mib, DISK: config.disk_mib, SHARED: config.shared_mib}
        size = {RAM: blocks.block_bytes, DISK: blocks.block_bytes + HEADER_BYTES, SHARED: blocks.block_bytes + HEADER_BYTES}
        self.contents = Contents({name: Tier(name, mib * MIB, size[name]) for name, mib in sizes.items() if mib}, found)
        if DISK in found:
            self.contents.tiers[DISK].load(by_name(found[DISK].scan(), lambda place: False))
        self.writer = Writer(self.contents, blocks.shape, max(1, config.queue_mib * MIB // blocks.block_bytes), config.scan_s)
        self._reader = Reader(self.contents)
        self._threads = [
            threading.Thread(target=part.run, daemon=True, name=f"tiers {name}")
            for name, part in (("reader", self._reader), ("writer", self.writer))
        ]
        for thread in self._threads if found else ():
            thread.start()

    def use(self, versions: range, weights: Mapping[int, bytes]) -> None:
        """From now on only KV of these versions is found, and of these weights: their fingerprints, by version."""
        with self.contents.lock:
            self.contents.versions, self.contents.weights = versions, weights

    def save(self, key: bytes, block: int) -> None:
        """The device is about to overwrite this block."""
        contents, version = self.contents, int(self._blocks.version(block))
        weights = contents.weights.get(version)
        if weights is None or version not in contents.versions:
            return
        place = Place(version, weights[:8])
        with contents.lock:
            if key in contents.queue and contents.queue[key][0] == place:
                return
            if RAM in contents.tiers:
                self._save_in_ram(contents.tiers[RAM], key, place, block)
            elif contents.lower_has(key, place):
                self._touch(next(iter(contents.stores)), key)
            else:
                self.writer.push(key, place, lambda: self._blocks.read(block))

    def find(self, request: GenerateRequest, keys: Sequence[bytes]) -> int:
        found: Counter[str] = Counter()
        contents = self.contents
        with contents.lock:
            for key in keys:
                name = contents.where(key)
                if name is None:
                    break
                found[name] += 1
        missing = len(keys)
        for name in contents.tiers:
            missing -= found[name]
            contents.counts[f"{name}/miss_tokens"] += missing * self._blocks.block_tokens
        count = sum(found.values())
        return count if count >= self._min_blocks else 0

    def start(self, request: GenerateRequest, keys: Sequence[bytes], wake: Callable[[], None]) -> TierFetch:
        """What is in RAM is there at once; the rest becomes work for the reader."""
        contents = self.contents
        work = Work(fetch := TierFetch(self._blocks, len(keys), wake, contents.counts))
        fetch.on_late = lambda: self._late(work)
        with contents.lock:
            for i, key in enumerate(keys):
                name = contents.where(key)
                if name is None:
                    fetch.limit = i
                    break
                if name != RAM:
                    place = contents.tiers[name].get(key)
                    assert place is not None
                    work.items.append((i, key, name, place))
                else:
                    fetch.deliver(i, contents.in_ram(key), RAM)
                self._touch(name, key)
            if work.items:
                self._reader.push(work)
            else:
                fetch.arrived = True
        return fetch

    def values(self) -> dict[str, float]:
        """Metrics."""
        contents = self.contents
        with contents.lock:
            counts, mib = contents.counts, self._blocks.block_bytes / MIB
            values = {"engine/tiers/queue_mib": len(contents.queue) * mib, "engine/tiers/dropped": float(counts["dropped"])}
            for name, tier in contents.tiers.items():
                values |= {
                    f"engine/tiers/{name}/hit_tokens": float(counts[f"{name}/hit_tokens"]),
                    f"engine/tiers/{name}/miss_tokens": float(counts[f"{name}/miss_tokens"]),
                    f"engine/tiers/{name}/read_mib": counts[f"{name}/read_bytes"] / MIB,
                    f"engine/tiers/{name}/written_mib": counts[f"{name}/written_bytes"] / MIB,
                    f"engine/tiers/{name}/used_mib": tier.used_bytes / MIB,
                    f"engine/tiers/{name}/evicted": float(tier.evicted),
                    f"engine/tiers/{name}/damaged": float(counts[f"{name}/damaged"]),
                    f"engine/tiers/{name}/on": float(name not in contents.health or contents.health[name].ok),
                }
        return values

    def close(self) -> None:
        """Write what is queued, for CLOSE_S at most, and end the threads."""
        self._reader.close()
        self.writer.close()
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
            with self.contents.lock:
                if not self.contents.queue:
                    return True
            time.sleep(0.005)
        return False

    def _save_in_ram(self, tier: Tier, key: bytes, place: Place, block: int) -> None:
        """And send down what RAM has no room for any more. Under the lock."""
        contents = self.contents
        if tier.get(key) == place:
            tier.touch(key)
            return
        contents.ram[key] = payload = self._blocks.read(block)
        tier.put(key, place)
        contents.counts["ram/written_bytes"] += payload.nbytes
        while tier.over:
            old, old_place = tier.oldest()
            tier.evict(old)
            payload = contents.ram.pop(old)
            if not contents.lower_has(old, old_place):
                self.writer.push(old, old_place, lambda payload=payload: payload)

    def _touch(self, name: str, key: bytes) -> None:
        """Used now. Under the lock."""
        tier = self.contents.tiers.get(name)
        if tier is not None and tier.get(key) is not None:
            tier.touch(key)
        if name == SHARED:
            self.writer.touch(key)

    def _late(self, work: Work) -> None:
        """The deadline passed before the reader was through."""
        for name in {name for _, _, name, _ in work.items}:
            error = TimeoutError(f"blocks did not come within engine.tiers.fetch_timeout_s = {self.timeout_s:g}")
            self.contents.health[name].failed(error)

    def _open_folders(self, config: TiersConfig) -> dict[str, BlockStore]:
        stores: dict[str, BlockStore] = {}
        shape, size = self._blocks.shape, self._blocks.block_bytes
        if config.disk_path is not None:
            path, self._claim = claim_folder(config.disk_path)
            stores[DISK] = _open(DISK, path, shape, size)
        if config.shared_path is not None:
            stores[SHARED] = _open(SHARED, config.shared_path, shape, size)
        return stores


def _open(name: str, path: Path, shape: bytes, block_bytes: int) -> FolderStore:
    try:
        return FolderStore(path, shape, block_bytes, private=name == DISK)
    except OSError as error:
        raise ConfigError(f"engine.tiers.{name}_path = {str(path)!r} cannot be used: {error.strerror or error}") from None
