"""Prefix cache: finds KV blocks (with their routing rows) whose tokens and all tokens before them are the same.

Blocks go by their keys (`serving.keys`). Knows nothing of weights: the salt, from which keys start, carries the policy version.

A block that is not full can be found by the tokens in it, if a peer brought it (`serving.keys.tail_key`). Whoever finds it copies it: one
goes on to fill it otherwise than another.

A block may be inserted as soon as the step that fills it is planned: within a step each layer writes all keys and values before anybody
attends, so sequences admitted in the same step (the rollouts of one group) share the prompt that the first of them computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slipstream.engine.kv import BlockPool


class PrefixCache:
    """Key -> block, for blocks whose content is (or in this step becomes) complete."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tails: set[int] = set()
        pool.forget = self._reclaim
        self.reclaimed: Callable[[bytes, int], None] = lambda key, block: None
        """Told the key and full block of content that is about to be overwritten for want of room: the last moment to copy it."""

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix. The caller shares them before it allocates anything."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find_tail(self, key: bytes) -> int | None:
        """A block that is not full."""
        return self._block_of.get(key)

    @property
    def has_tails(self) -> bool:
        return bool(self._tails)

    def insert(self, key: bytes, block: int, is_tail: bool = False) -> None:
        """Make a used block findable. When another block has the same content, that one stays the entry."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self._pool.set_findable(block)
            if is_tail:
                self._tails.add(block)

    def clear(self) -> None:
        """Drop every entry: no later request finds KV that was written until now."""
        self.drop(lambda block: True)

    def drop(self, is_unwanted: Callable[[int], bool]) -> None:
        """Drop the entries of these blocks."""
        for block in [block for block in self._key_of if is_unwanted(block)]:
            self._forget(block)
            self._pool.set_unfindable(block)

    def _reclaim(self, block: int) -> None:
        if block not in self._tails:
            self.reclaimed(self._key_of[block], block)
        self._forget(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        self._tails.discard(block)
