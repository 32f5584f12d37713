"""Blocks that arrive from outside the device: the one way in, for tiers and for peers.

    waiting --(a source has more of its prefix)--> fetching --(arrived, failed, or late)--> waiting, at the head --> running

A source is asked once per admission how many of the keys that follow a sequence's device prefix it can bring. If some, the sequence steps
out of the queue, blocks are reserved for them (and the device prefix is held), and the source loads into host memory in threads of its
own. Between steps the engine's thread copies what has arrived into the reserved blocks, some of it at a time while others run (`pace`).
When the fetch is over, the leading blocks that are complete become findable, the others are free again, and the sequence goes to the head
of the queue, where the ordinary prefix match finds what came and the rest is computed. So a source that fails, lies about what it has, or
is late costs time, never a token. Sequences that want the same blocks wait for the one fetch that is under way.

Knows nothing of where blocks come from; what is in the books of the pool is checked by `BlockPool.check_integrity` through `held`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slipstream.engine.kv import BlockPool
from slipstream.engine.prefix import PrefixCache
from slipstream.engine.sequence import Sequence as Running
from slipstream.types import GenerateRequest

log = logging.getLogger(__name__)


ENDINGS = ("whole", "part", "failed", "late", "dropped")
"""How a fetch can end: all blocks came; some; none; some or none within the deadline; nobody wanted it any more."""


class Fetch(Protocol):
    """Blocks under way, one for each key of `BlockSource.start`. The engine's thread calls; only the loading is done elsewhere."""

    @property
    def ready(self) -> bool:
        """Whether `write` would copy something or `done` is set. After each change to true the source calls `wake`."""
        ...

    @property
    def done(self) -> bool:
        """`write` has nothing more to copy and never will."""
        ...

    def write(self, blocks: Sequence[int], most: int) -> int:
        """Copy what has arrived and was not copied, but at most `most` blocks of it, into these device blocks; how many of them, from the
        first on, are now complete."""
        ...

    def tier(self, index: int) -> str:
        """Where block `index` came from: a key of `Completion.cached_by_tier`."""
        ...

    def cancel(self, late: bool) -> None:
        """Nobody wants it any more (`late`: its time is up); `write` is not called again. Loading may end when it likes."""
        ...


class BlockSource(Protocol):
    """Something outside the device that has blocks. Called by the engine's thread: nothing here may block."""

    timeout_s: float
    """Most seconds that a sequence waits for a fetch of this source."""
    brings_tails: bool
    """Whether the last key that it is shown may be that of a block which is not full."""

    def find(self, request: GenerateRequest, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on, are worth fetching from here; 0: compute. May turn out to be fewer."""
        ...

    def start(self, request: GenerateRequest, keys: Sequence[bytes], wake: Callable[[], None]) -> Fetch:
        """Begin to load the blocks of these keys. `wake`, callable from any thread, makes the engine look at the fetch again."""
        ...


@dataclass(slots=True, eq=False)
class Pending:
    """A sequence that waits for blocks, and what it holds meanwhile."""

    sequence: Running
    source: BlockSource
    fetch: Fetch
    keys: Sequence[bytes]
    has_tail: bool
    """Whether the last key is that of a block which is not full."""
    prefix: list[int]
    """Device blocks before the first key, shared so that they are not reclaimed."""
    blocks: list[int]
    """Reserved, one a key."""
    began_s: float
    complete: int = 0
    """Blocks that were copied to the device."""
    followers: list[Running] = field(default_factory=list)
    """Sequences that want the same blocks."""


class Fetches:
    """All fetches under way, oldest first. Whoever calls puts the sequences that come back at the head of the queue."""

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache,
        versions_N: np.ndarray,
        block_tokens: int,
        sources: Sequence[BlockSource],
        wake: Callable[[], None],
    ) -> None:
        self._pool, self._prefix, self._versions_N, self._block_tokens = pool, prefix, versions_N, block_tokens
        self._sources = sources
        self._wake = wake
        self._pending: list[Pending] = []
        self.ended: Counter[str] = Counter()
        """Fetches by how they ended: `ENDINGS`."""
        self.seconds = 0.0
        """Spent in fetches that were not dropped."""

    def __len__(self) -> int:
        return len(self._pending)

    def wants(self, sequence: Running) -> bool:
        """Whether a source has not been asked yet for this sequence."""
        return sequence.asked < len(self._sources)

    def waiting(self) -> Iterator[Running]:
        """Every sequence that waits for a fetch."""
        for pending in self._pending:
            yield pending.sequence
            yield from pending.followers

    def held(self) -> Iterator[list[int]]:
        for pending in self._pending:
            yield pending.prefix
            yield pending.blocks

    def ready(self, now: float) -> bool:
        """Whether `collect` would do something."""
        return any(pending.fetch.ready or now >= _deadline(pending) for pending in self._pending)

    def deadline(self) -> float | None:
        """When `ready` becomes true though nobody wakes the engine."""
        return min(map(_deadline, self._pending), default=None)

    def begin(self, sequence: Running, prefix: list[int], keys: Sequence[bytes], tail: bytes | None, now: float) -> bool:
        """Ask the sources for the blocks after `prefix`; whether the sequence now waits for some. The caller has checked the room.

        `keys` are those of full blocks, `tail` that of the one which its tokens but the last end in, if any.
        """
        if not keys:
            sequence.asked = len(self._sources)
        elif (same := self._under_way(keys[0])) is not None:
            same.followers.append(sequence)
            return True
        while self.wants(sequence):
            source = self._sources[sequence.asked]
            sequence.asked += 1
            try:
                shown = [*keys, tail] if tail is not None and source.brings_tails else keys
                wanted = shown[: source.find(sequence.request, shown)]
                fetch = source.start(sequence.request, wanted, self._wake) if wanted else None
            except Exception as error:
                log.error("a source of KV blocks failed and they are computed: %s", error, exc_info=error)
                continue
            if fetch is not None:
                self._pool.share(prefix)
                blocks, has_tail = self._pool.allocate(len(wanted)), len(wanted) > len(keys)
                self._pending.append(Pending(sequence, source, fetch, wanted, has_tail, prefix, blocks, now))
                return True
        return False

    def collect(self, now: float, versions: Container[int], most: int) -> tuple[list[Running], int]:
        """Take in what has arrived, at most `most` blocks. Blocks of other versions are not taken.

        Returns the sequences whose fetch is over, in order of arrival, and how many more blocks could have been taken.
        """
        back: list[Running] = []
        for pending in [p for p in self._pending if p.fetch.ready or now >= _deadline(p)]:
            if most <= 0:
                break
            try:
                complete = pending.fetch.write(pending.blocks, most)
                over = pending.fetch.done or complete == len(pending.blocks)
            except Exception as error:
                log.error("a fetch of KV blocks failed and they are computed: %s", error, exc_info=error)
                complete, over = 0, True
            most -= max(0, complete - pending.complete)
            pending.complete = complete
            late = now >= _deadline(pending)
            if over or late:
                self._accept(pending, versions)
                self.ended["whole" if complete == len(pending.keys) else "late" if not over else "part" if complete else "failed"] += 1
                self.seconds += now - pending.began_s
                back += self._close(pending)
        return back, most

    def cancel(self, sequence: Running) -> list[Running]:
        """It does not wait any more; those that waited with it do so for nothing now."""
        for pending in self._pending:
            if pending.sequence is sequence:
                return self._drop(pending)[1:]
            if sequence in pending.followers:
                pending.followers.remove(sequence)
        return []

    def cancel_newest(self) -> list[Running]:
        return self._drop(self._pending[-1])

    def cancel_all(self) -> list[Running]:
        return [sequence for pending in [*self._pending] for sequence in self._drop(pending)]

    def _under_way(self, key: bytes) -> Pending | None:
        return next((pending for pending in self._pending if key in pending.keys), None)

    def _accept(self, pending: Pending, versions: Container[int]) -> None:
        """Make the complete blocks findable, up to one that another version has written."""
        brought, known = pending.sequence.brought, len(pending.sequence.tokens_T) - 1
        for i, (key, block) in enumerate(zip(pending.keys[: pending.complete], pending.blocks, strict=False)):
            if int(self._versions_N[block]) not in versions:
                break
            self._prefix.insert(key, block, is_tail=pending.has_tail and i == len(pending.keys) - 1)
            tokens = min(self._block_tokens, known - (len(pending.prefix) + i) * self._block_tokens)
            brought[pending.fetch.tier(i)] = brought.get(pending.fetch.tier(i), 0) + tokens

    def _drop(self, pending: Pending) -> list[Running]:
        self.ended["dropped"] += 1
        return self._close(pending)

    def _close(self, pending: Pending) -> list[Running]:
        pending.fetch.cancel(late=time.perf_counter() >= _deadline(pending))
        self._pending.remove(pending)
        self._pool.release([*pending.prefix, *pending.blocks])
        return [pending.sequence, *pending.followers]


def _deadline(pending: Pending) -> float:
    return pending.began_s + pending.source.timeout_s
