"""The one wire format: a checked header and raw array bytes. No pickle, no JSON lists of numbers.

    offset  size  field
    0       4     magic b"SLIP"
    4       2     schema version (little endian)
    6       2     reserved, 0
    8       8     xxh3-64 of everything after this field
    16      4     length H of the header
    20      H     msgpack: {"kind": str, "meta": {...}, "arrays": [[name, dtype, shape, offset, bytes], ...]}
    20 + H  ...   array bytes; each array starts at a multiple of 16 from the start of the payload

`encode` and `decode` carry a kind, plain values and named arrays; `transport.codec` maps the nouns of `slipstream.types` onto it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash

from slipstream.errors import WireError

MAGIC = b"SLIP"
SCHEMA = 1
_ALIGN = 16
_DTYPES = {name: np.dtype(name) for name in ("uint8", "uint16", "int32", "int64", "float32", "bool")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # dtype.name is computed at every access; byte-swapped dtypes are not here


def encode(kind: str, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """One message. `meta` holds plain msgpack values; `arrays` may be of any shape, in the dtypes of `_DTYPES`."""
    table, chunks, offset = [], [], 0
    for name, array in arrays.items():
        dtype = _NAMES.get(array.dtype)
        if dtype is None:
            raise WireError(f"{kind}: array {name!r} has dtype {array.dtype}; expected one of {sorted(_DTYPES)}")
        raw = np.ascontiguousarray(array).tobytes()
        table.append([name, dtype, list(array.shape), offset, len(raw)])
        pad = -len(raw) % _ALIGN
        chunks.append(raw)
        chunks.append(b"\0" * pad)
        offset += len(raw) + pad
    header = msgspec.msgpack.encode({"kind": kind, "meta": meta, "arrays": table})
    body = b"".join([len(header).to_bytes(4, "little"), header, *chunks])
    return b"".join([MAGIC, SCHEMA.to_bytes(2, "little"), b"\0\0", xxhash.xxh3_64_digest(body), body])


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


def _array(view: memoryview, base: int, kind: str, name: str, dtype: str, shape: list[int], offset: int, size: int) -> np.ndarray:
    start = base + offset
    known = _DTYPES.get(dtype)
    if known is None or start + size > len(view) or math.prod(shape) * known.itemsize != size:
        raise WireError(f"{kind}: array {name!r} ({dtype} {shape}, {size} bytes at {offset}) does not fit the message")
    return np.frombuffer(view[start : start + size], dtype=known).reshape(shape)
