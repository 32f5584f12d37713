"""The one wire format: a checked header and raw array bytes. No pickle, no JSON lists of numbers.

    offset  size  field
    0       4     magic b"SLIP"
    4       2     schema version (little endian)
    6       2     reserved, 0
    8       8     xxh3-64 of everything after this field
    16      4     length H of the header
    20      H     msgpack: {"kind": str, "meta": {...}, "arrays": [[name, dtype, shape, offset, bytes, zstd], ...]}
    20 + H  ...   array bytes; each array starts at a multiple of 16 from the start of the payload

An array with `zstd` true is one zstandard frame. `encode` and `decode` carry a kind, plain values and named arrays; `transport.codec` maps
the nouns of `slipstream.types` onto it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard

from slipstream.errors import WireError

MAGIC = b"SLIP"
SCHEMA = 2
Pieces = list[bytes | memoryview]
_ALIGN = 16
COMPRESS_FROM_BYTES = 1 << 16
"""Below, compressing saves nobody's time."""
_LEVEL = 1
"""Of zstandard. Level 3 makes routing rows 4% smaller (benchmarks.replay_payload)."""
_WORTH = 0.9
"""What does not get smaller than this share of its size is sent as it is: unpacking it would be work for nothing."""
_DTYPES = {name: np.dtype(name) for name in ("uint8", "uint16", "int32", "int64", "float32", "bool")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # dtype.name is computed at every access; byte-swapped dtypes are not here


def encode(kind: str, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray], compress: Collection[str] = ()) -> Pieces:
    """One message, in pieces that lie end to end; those of large arrays are the arrays' own memory.

    `meta` holds plain msgpack values; `arrays` may be of any shape, in the dtypes of `_DTYPES`. Those named in `compress` are compressed
    where that is worth it.
    """
    table, chunks, offset = [], [], 0
    for name, array in arrays.items():
        dtype = _NAMES.get(array.dtype)
        if dtype is None:
            raise WireError(f"{kind}: array {name!r} has dtype {array.dtype}; expected one of {sorted(_DTYPES)}")
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data  # no copy
        packed = _compressed(raw) if name in compress else None
        chunk = raw if packed is None else packed
        table.append([name, dtype, list(array.shape), offset, len(chunk), packed is not None])
        pad = -len(chunk) % _ALIGN
        chunks += [chunk, b"\0" * pad]
        offset += len(chunk) + pad
    header = msgspec.msgpack.encode({"kind": kind, "meta": meta, "arrays": table})
    body = [len(header).to_bytes(4, "little"), header, *chunks]
    digest = xxhash.xxh3_64()
    for chunk in body:
        digest.update(chunk)
    return [b"".join([MAGIC, SCHEMA.to_bytes(2, "little"), b"\0\0", digest.digest()]), *body]


def _compressed(raw: memoryview) -> bytes | None:
    """None where it is not worth it."""
    if len(raw) < COMPRESS_FROM_BYTES:
        return None
    start = (len(raw) - COMPRESS_FROM_BYTES) // 2
    for part in (raw[start : start + COMPRESS_FROM_BYTES], raw):  # first a sample: most that is not worth it ends there
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(part)
        if len(packed) > _WORTH * len(part):
            return None
    return packed


def decode(data: bytes | memoryview, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The meta and arrays of a message of this kind. Arrays are read-only views of `data`.

    Raises WireError: wrong magic, schema, checksum, kind, or an array that reaches past the end.
    """
    view = memoryview(data)
    if len(view) < 20 or bytes(view[:4]) != MAGIC:
        raise WireError(f"{kind}: not a slipstream message ({len(view)} bytes, starts with {bytes(view[:4])!r})")
    schema = int.from_bytes(view[4:6], "little")
    if schema != SCHEMA:
        raise WireError(f"{kind}: schema version {schema}; this build reads {SCHEMA}. Use the same slipstream version on both sides")
    if xxhash.xxh3_64_digest(view[16:]) != bytes(view[8:16]):
        raise WireError(f"{kind}: checksum mismatch over {len(view)} bytes: the message is truncated or corrupt")
    header_end = 20 + int.from_bytes(view[16:20], "little")
    try:
        header = msgspec.msgpack.decode(view[20:header_end])
        found, meta, table = header["kind"], header["meta"], header["arrays"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise WireError(f"{kind}: header does not decode: {error}") from None
    if found != kind:
        raise WireError(f"expected a {kind!r} message, got {found!r}")
    return meta, {name: _array(view, header_end, kind, name, *entry) for name, *entry in table}


def _array(
    view: memoryview, base: int, kind: str, name: str, dtype: str, shape: list[int], offset: int, size: int, packed: bool
) -> np.ndarray:
    start, known = base + offset, _DTYPES.get(dtype)
    raw = view[start : start + size]
    wanted = math.prod(shape) * known.itemsize if known is not None else -1
    if known is None or len(raw) != size or wanted != (zstandard.frame_content_size(raw) if packed else size):
        raise WireError(f"{kind}: array {name!r} ({dtype} {shape}, {size} bytes at {offset}) does not fit the message")
    if packed:
        raw = zstandard.ZstdDecompressor().decompress(raw)
    return np.frombuffer(raw, dtype=known).reshape(shape)
