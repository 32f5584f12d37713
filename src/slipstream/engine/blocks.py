"""KV blocks as bytes: how whoever moves a block (a tier, a peer) reads it from the device arrays, writes it there, and knows it again.

A payload is, layer by layer, the bytes of every array of `KvCache.parts`, then the tail: the routing rows of the block's tokens and the
policy version that wrote it (int32). So the rows and the age travel with the keys and values, and nobody else looks inside.

Outside the process a payload has a header in front (`seal`, `open_sealed`), which says whose it is:

    offset  size  field
    0       4     magic b"SLKV"
    4       4     layout number (little endian)
    8       8     bytes of the payload
    16      16    key: the prefix chain (see `engine.prefix`)
    32      16    shape: of model, KV dtype, block size and arithmetic; blocks of another shape mean nothing here
    48      16    weights: of the version that wrote it; the same number in another run is another policy
    64      8     xxh3-64 of the 64 bytes before and of the payload

Called between steps only, by the engine's thread; payloads are host memory and may be used by any. Shape suffixes: N blocks of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from slipstream.engine.kv import KvCache
from slipstream.engine.room import HEADER, HEADER_BYTES, VERSION_BYTES
from slipstream.errors import WireError
from slipstream.models.spec import ModelSpec

Payload = bytes | bytearray | memoryview | np.ndarray
"""Bytes of a block, or of one layer of several: anything with a contiguous buffer."""
LAYOUT = 1
"""Changes with the order of bytes in a payload or the meaning of a header field (`room.HEADER`)."""
_MAGIC = b"SLKV"


class Blocks:
    """The device arrays of one engine, seen as blocks of bytes."""

    def __init__(self, cache: KvCache, spec: ModelSpec, arithmetic: str) -> None:
        """`arithmetic`: how the model multiplies, where the arrays do not show it (engine.dtype, scales)."""
        self._cache = cache
        self.block_tokens = cache.block_tokens
        parts = [cache.parts(layer) for layer in range(spec.num_layers)]
        self._parts = [[_rows(part) for part in layer] for layer in parts]
        self._routing = cache.routing.reshape(cache.num_blocks, -1).view(np.uint8)
        self.num_layers = spec.num_layers
        self.layer_bytes = tuple(sum(part.shape[1] for part in layer) for layer in self._parts)
        self.tail_bytes = self._routing.shape[1] + VERSION_BYTES
        self.block_bytes = sum(self.layer_bytes) + self.tail_bytes
        arrays = [[(str(part.dtype), tuple(part.shape[1:])) for part in layer] for layer in parts]
        rows = (cache.routing.dtype.str, cache.routing.shape[1:])
        described = f"{LAYOUT} {spec!r} {arithmetic} {cache.block_tokens} {arrays} {rows}"
        self.shape = xxhash.xxh3_128_digest(described.encode())

    def read(self, block: int) -> np.ndarray:
        """A copy of the block's payload, uint8."""
        payload = np.empty(self.block_bytes, np.uint8)
        at = 0
        for part in (part for layer in self._parts for part in layer):
            end = at + part.shape[1]
            payload[at:end] = part[block]
            at = end
        payload[at:-4] = self._routing[block]
        payload[-4:] = self._cache.versions_N[block : block + 1].view(np.uint8)
        return payload

    def write(self, block: int, payload: Payload) -> None:
        """Make `payload` the content of a block that nobody reads yet. Raises WireError when it has another size."""
        raw = np.frombuffer(payload, np.uint8)
        if len(raw) != self.block_bytes:
            raise WireError(f"a KV block of {len(raw)} bytes; this engine's have {self.block_bytes}")
        at = 0
        for part in (part for layer in self._parts for part in layer):
            end = at + part.shape[1]
            part[block] = raw[at:end]
            at = end
        self._routing[block] = raw[at:-VERSION_BYTES]
        self._cache.versions_N[block] = version_of(raw)

    def write_many(self, blocks: Sequence[int], rows: np.ndarray) -> None:
        """As `write` for each of these blocks; `rows` is [N, block_bytes]. An array at a time: a tenth of the time for small blocks."""
        at = 0
        for part in (part for layer in self._parts for part in layer):
            end = at + part.shape[1]
            part[blocks] = rows[:, at:end]
            at = end
        self._routing[blocks] = rows[:, at:-VERSION_BYTES]
        self._cache.versions_N[blocks] = rows[:, -VERSION_BYTES:].copy().view(np.int32)[:, 0]

    def version(self, block: int) -> int:
        """The policy version that wrote it."""
        return int(self._cache.versions_N[block])

    def read_layer(self, layer: int, blocks: Sequence[int]) -> np.ndarray:
        """[N, layer_bytes[layer]]: one layer of these blocks, as it stands in their payloads."""
        return np.concatenate([part[blocks] for part in self._parts[layer]], axis=1)

    def read_tails(self, blocks: Sequence[int]) -> np.ndarray:
        """[N, tail_bytes]: routing rows and version of these blocks."""
        versions_N = self._cache.versions_N[blocks].view(np.uint8).reshape(len(blocks), 4)
        return np.concatenate([self._routing[blocks], versions_N], axis=1)


def _rows(part: torch.Tensor) -> np.ndarray:
    """[N, bytes of a block]: the memory of `part` itself."""
    return part.view(torch.uint8).numpy().reshape(len(part), -1)


def version_of(payload: np.ndarray) -> int:
    """The policy version that wrote this block."""
    return int.from_bytes(payload[-4:].tobytes(), "little", signed=True)


@dataclass(frozen=True, slots=True)
class Label:
    """Whose block it is: what a header says beside the checksum."""

    key: bytes
    shape: bytes
    weights: bytes


def seal(label: Label, payload: Payload) -> bytes:
    """The header for this payload: written in front of it, not copied together with it."""
    head = HEADER.pack(_MAGIC, LAYOUT, _raw(payload).nbytes, label.key, label.shape, label.weights)
    return head + _digest(head, payload)


def open_sealed(header: Payload, payload: Payload) -> Label:
    """Whose block this is. Raises WireError: not a block, another layout or length, or one of its bytes is not as it was written.

    The caller compares the label with what it asked for.
    """
    raw, body = bytes(header), _raw(payload)
    if len(raw) != HEADER_BYTES or raw[:4] != _MAGIC:
        raise WireError(f"not a KV block: {len(raw)} bytes of header that start with {raw[:4]!r}")
    _, layout, size, key, shape, weights = HEADER.unpack(raw[: HEADER.size])
    if layout != LAYOUT:
        raise WireError(f"a KV block of layout {layout}; this slipstream has {LAYOUT}")
    if size != body.nbytes:
        raise WireError(f"a KV block of {body.nbytes} bytes whose header says {size}")
    if _digest(raw[: HEADER.size], payload) != raw[HEADER.size :]:
        raise WireError(f"KV block {key.hex()} is damaged: its checksum differs")
    return Label(key, shape, weights)


def _raw(payload: Payload) -> memoryview:
    return payload.data if isinstance(payload, np.ndarray) else memoryview(payload)


def _digest(head: bytes, payload: Payload) -> bytes:
    digest = xxhash.xxh3_64(head)
    digest.update(_raw(payload))
    return digest.digest()
