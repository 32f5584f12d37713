"""Which blocks each replica presumably holds: what was sent to it, in the order in which its own cache would reclaim it.

Each replica's blocks are kept in least-recently-used order within its capacity, as its engine keeps them. A completion says how many
prompt tokens were really cached; a block that was believed to be there and was not has been reclaimed, and with it all that was used
longer ago. A restart forgets everything. A retired salt needs no rule: its keys are never asked for again and go as the oldest, here as
in the engine.

One dictionary from key to a bit set of replicas, so that a lookup costs one access a block however many replicas there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class PrefixIndex:
    """Key -> replicas, bounded for each replica. Keys are anything hashable that names a block with all blocks before it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._held: dict[str, OrderedDict[bytes, int]] = {}
        """Replica -> key -> when it was last used; negative while only a request that has not ended vouches for the block."""
        self._bit: dict[str, int] = {}
        self._name: dict[int, str] = {}
        self._uses = 0

    def size(self, replica: str) -> int:
        """Blocks that it presumably holds."""
        return len(self._held.get(replica, ()))

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `keys` that each replica holds; replicas with none are left out."""
        found: dict[str, int] = {}
        if not keys:
            return found
        holders = self._holders.get(keys[0], 0)
        for i, key in enumerate(keys):
            still = holders & self._holders.get(key, 0)
            if still != holders:
                found.update((name, i) for name in self._names(holders ^ still))
                holders = still
            if not holders:
                return found
        found.update((name, len(keys)) for name in self._names(holders))
        return found

    def use(self, replica: str, keys: Sequence[bytes], capacity: int, certain: bool) -> list[int]:
        """The replica uses these blocks now. `certain`: they are there; otherwise they will be when the request has been computed.

        Returns when each was last used there before, 0 for what was not there. The last block of a prefix counts as used longest ago:
        engines give up the tail of a sequence before the head, which others share.
        """
        if replica not in self._held:
            self._bit[replica] = bit = self._free_bit()
            self._name[bit] = replica
            self._held[replica] = OrderedDict()
        held, bit, holders = self._held[replica], self._bit[replica], self._holders
        self._uses += 1
        now, before = self._uses, [held.get(key, 0) for key in keys]
        for key, last in zip(reversed(keys), reversed(before), strict=True):
            held[key] = now if certain or last > 0 else -now
            if last:
                held.move_to_end(key)
            else:
                holders[key] = holders.get(key, 0) | bit
        while len(held) > capacity:
            self._drop(held.popitem(last=False)[0], bit)
        return before

    def reclaimed(self, replica: str, last_use: int) -> None:
        """A block last used then was not there: neither is what was used before it."""
        held, bit = self._held.get(replica), self._bit.get(replica, 0)
        while held:
            key, used = next(iter(held.items()))
            if abs(used) >= last_use:
                return
            del held[key]
            self._drop(key, bit)

    def forget(self, replica: str) -> None:
        """Its cache is empty, or it is gone."""
        bit = self._bit.pop(replica, 0)
        for key in self._held.pop(replica, ()):
            self._drop(key, bit)
        self._name.pop(bit, None)

    def _drop(self, key: bytes, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def _names(self, bits: int) -> Iterator[str]:
        while bits:
            low = bits & -bits
            yield self._name[low]
            bits ^= low

    def _free_bit(self) -> int:
        bit = 1
        while bit in self._name:
            bit <<= 1
        return bit
