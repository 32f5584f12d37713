"""KV memory: which blocks are free, cached or used (`BlockPool`), and the arrays behind the block ids (`KvCache`).

A block holds the keys, values and routing rows of `block_tokens` consecutive tokens of one sequence, in every layer. It is

    free     nobody refers to it and nobody can find it
    cached   nobody refers to it, but the prefix cache can still find its content; reclaimed in least-recently-used order
    used     at least one sequence refers to it

and free + cached + used = total, always. Routing rows live beside the keys and values of the token that they belong to, so whatever
finds the KV of a token (a prefix hit, a resumed sequence) finds its rows as well.

Knows nothing of tokens, hashes or requests. Shape suffixes: N blocks, B tokens in a block, G KV heads, d head dim, L MoE layers,
K experts per token.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from slipstream.engine.room import MIB, MIN_BLOCKS, block_bytes, routing_item_bytes
from slipstream.errors import ConfigError, StateError
from slipstream.models.spec import ModelSpec
from slipstream.ops.attention import Pages
from slipstream.ops.fp8_kv import Fp8Pages
from slipstream.ops.native import in_large_pages


class BlockPool:
    """Reference counts over block ids. `forget(block)` is called when a cached block is reclaimed."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.forget: Callable[[int], None] = lambda block: None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._findable = bytearray(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def is_idle(self, block: int) -> bool:
        """Whether the block is cached: sharing it takes one from `available`."""
        return self._refs[block] == 0

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, the longest unused content reclaimed first. Raises StateError when there are too few."""
        if count > self.available:
            raise StateError(
                f"asked for {count} KV blocks with {self.available} of {self.num_blocks} available: the caller must check first"
            )
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            self._findable[block] = 0
            self.forget(block)
            self._free.append(block)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these used or cached blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less. The last one makes a findable block cached, another one free.

        In reverse, so that of one sequence the tail is reclaimed before the head that more others can share.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._findable[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def set_findable(self, block: int) -> None:
        """The prefix cache has an entry for this used block."""
        self._findable[block] = 1

    def set_unfindable(self, block: int) -> None:
        """The prefix cache has dropped its entry: a cached block becomes free."""
        self._findable[block] = 0
        if self._refs[block] == 0 and block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Compare with the blocks that each sequence holds. Raises StateError where the books do not balance."""
        counted = Counter(block for held in holders for block in held)
        if any(self._refs[block] != counted.get(block, 0) for block in range(self.num_blocks)):
            wrong = [(b, self._refs[b], counted.get(b, 0)) for b in range(self.num_blocks) if self._refs[b] != counted.get(b, 0)]
            raise StateError(f"KV reference counts differ from what sequences hold (block, count, held): {wrong[:8]}")
        free, cached, used = set(self._free), set(self._cached), set(counted)
        if len(free) + len(cached) + len(used) != self.num_blocks or len(free | cached | used) != self.num_blocks:
            raise StateError(f"KV blocks do not add up: {len(free)} free + {len(cached)} cached + {len(used)} used != {self.num_blocks}")
        if len(free) != len(self._free) or any(not self._findable[block] for block in cached):
            raise StateError("a KV block is twice in the free list, or cached without an entry in the prefix cache")


def _arrays(pages: Pages) -> tuple[torch.Tensor, ...]:
    return (pages.codes, pages.scales) if isinstance(pages, Fp8Pages) else (pages,)


class KvCache:
    """The arrays. `keys[layer]` and `values[layer]` are [N, B, G, d], or that in FP8 (`ops.fp8_kv`); `index_keys[layer]` is [N, B, i] where
    a layer chooses what it sees (sparse attention); `routing` is [N * B, L, K]; `versions_N` says who wrote a block."""

    def __init__(self, spec: ModelSpec, block_tokens: int, memory_mib: int, dtype: torch.dtype, capture: bool, fp8: bool = False) -> None:
        """`dtype`: of keys and values, but with `fp8`; of index keys. They only choose, and a choice cannot be replayed: never FP8."""
        self.block_tokens = block_tokens
        self.num_moe_layers = len(spec.moe_layers) if capture else 0
        self.row_dtype: np.dtype[Any] = np.dtype(f"u{routing_item_bytes(spec)}")
        self.num_blocks = self._count(memory_mib, block_bytes(spec, block_tokens, dtype.itemsize, capture, fp8))
        shape = (self.num_blocks, block_tokens, spec.num_kv_heads, spec.head_dim)

        def pages() -> Pages:
            return Fp8Pages.zeros(shape) if fp8 else in_large_pages(torch.empty(shape, dtype=dtype)).zero_()

        self.keys, self.values = ([pages() for _ in range(spec.num_layers)] for _ in range(2))
        self.index_keys = {
            layer: torch.zeros(self.num_blocks, block_tokens, spec.indexer.head_dim, dtype=dtype)
            for layer in spec.index_layers
            if spec.indexer is not None
        }
        rows = (self.num_blocks * block_tokens, self.num_moe_layers, spec.top_k if self.num_moe_layers else 0)
        self.routing = np.zeros(rows, self.row_dtype)
        self.versions_N = np.zeros(self.num_blocks, np.int32)

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Every array that holds something of this layer, each [N, ...]: what a block is made of, for whoever moves blocks."""
        index = (self.index_keys[layer],) if layer in self.index_keys else ()
        return (*_arrays(self.keys[layer]), *_arrays(self.values[layer]), *index)

    @property
    def nbytes(self) -> int:
        """Memory of all blocks."""
        arrays = sum(array.nbytes for layer in range(len(self.keys)) for array in self.parts(layer))
        return arrays + self.routing.nbytes + self.versions_N.nbytes

    def copy(self, source: int, target: int) -> None:
        """Give block `target` the content of block `source`: keys, values, routing rows, who wrote it."""
        for layer in range(len(self.keys)):
            for part in self.parts(layer):
                part[target] = part[source]
        by_block = self.routing.reshape(self.num_blocks, -1)
        by_block[target] = by_block[source]
        self.versions_N[target] = self.versions_N[source]

    def rows(self, blocks: np.ndarray, start: int, end: int) -> np.ndarray:
        """[end - start, L, K]: routing rows of these positions of the sequence that holds `blocks`. Copied by the block, not by the row."""
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        by_block = self.routing.reshape(self.num_blocks, self.block_tokens, *self.routing.shape[1:])
        rows = by_block[blocks[first:last]].reshape(-1, *self.routing.shape[1:])
        return rows[start - first * self.block_tokens : end - first * self.block_tokens]

    def _count(self, memory_mib: int, size: int) -> int:
        count = memory_mib * MIB // size
        if count < MIN_BLOCKS:
            raise ConfigError(
                f"engine.kv_memory_mib = {memory_mib} holds {count} blocks of {self.block_tokens} tokens ({size / MIB:.2f} MiB "
                "each): raise engine.kv_memory_mib or lower engine.block_tokens"
            )
        return count
