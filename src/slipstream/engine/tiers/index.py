"""The one index over all tiers: which blocks each of them has, in which order they were last used, and how much room they take.

Knows keys and sizes, not bytes. Not thread-safe: the hierarchy holds its lock around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the possible contents of a key a tier has: KV of one key differs with the weights that computed it."""

    version: int
    weights: bytes
    """First 8 bytes of the weights' fingerprint: the same number in another run is another policy."""


class Tier:
    """One tier's blocks, least recently used first, within a budget of bytes. All blocks have one size."""

    def __init__(self, name: str, capacity_bytes: int, block_bytes: int) -> None:
        self.name, self.block_bytes = name, block_bytes
        self.capacity = capacity_bytes // block_bytes
        """In blocks."""
        self.evicted = 0
        self._places: OrderedDict[bytes, Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def used_bytes(self) -> int:
        return len(self._places) * self.block_bytes

    @property
    def over(self) -> int:
        """Blocks above the budget."""
        return max(0, len(self._places) - self.capacity)

    def get(self, key: bytes) -> Place | None:
        return self._places.get(key)

    def touch(self, key: bytes) -> None:
        self._places.move_to_end(key)

    def put(self, key: bytes, place: Place) -> None:
        """Now the most recently used."""
        self._places[key] = place
        self._places.move_to_end(key)

    def put_aside(self, key: bytes) -> bytes:
        """What the tier has for this key stays, under the name that `by_name` gives to all but the usable one: the name."""
        place = self._places.pop(key)
        self.put(name := key + _suffix(place), place)
        return name

    def drop(self, key: bytes) -> None:
        """Forget it."""
        self._places.pop(key, None)

    def oldest(self, key: bytes | None = None) -> tuple[bytes, Place]:
        """The least recently used one, or this one, with its place."""
        name = next(iter(self._places)) if key is None else key
        return name, self._places[name]

    def evict(self, key: bytes) -> None:
        """Give it up for want of room."""
        self.evicted += key in self._places
        self.drop(key)

    def merge(self, found: Mapping[bytes, Place]) -> None:
        """What a look at the store has found: others' new blocks count as least recently used, and what is gone is forgotten.

        In order of keys, which depends on no clock.
        """
        self._places = OrderedDict((key, found[key]) for key in self._places if key in found)
        for key in sorted(found.keys() - self._places.keys(), reverse=True):
            self._places[key] = found[key]
            self._places.move_to_end(key, last=False)

    def load(self, found: Mapping[bytes, Place]) -> None:
        """What a store has kept from before, least recently used first."""
        self._places.update(found)


def by_name(found: Iterable[tuple[bytes, Place]], is_ours: Callable[[Place], bool]) -> dict[bytes, Place]:
    """Names for what a store has: the key, and where it has several contents for one, key and place for all but the newest usable one."""
    names: dict[bytes, Place] = {}
    for key, place in found:
        other = names.get(key)
        if other is not None and is_ours(place) and not (is_ours(other) and other.version > place.version):
            names[key + _suffix(other)] = other
            names[key] = place
        else:
            names[key if other is None else key + _suffix(place)] = place
    return names


def key_of(name: bytes) -> bytes:
    """See `by_name`."""
    return name[:KEY_BYTES]


def _suffix(place: Place) -> bytes:
    return place.weights + place.version.to_bytes(8, "little", signed=True)
