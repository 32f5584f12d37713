"""The wire format: what is sent arrives; what is damaged is refused; large arrays are compressed where it helps."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.errors import WireError
from slipstream.transport import wire

ROWS = np.tile(np.arange(16, dtype=np.uint8), (wire.COMPRESS_FROM_BYTES // 16, 1))
NOISE = np.random.default_rng(0).integers(0, 256, 2 * wire.COMPRESS_FROM_BYTES, np.uint8)


def encoded(*args) -> bytes:
    return b"".join(wire.encode(*args))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 3, 2)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "float32", "bool"])
def test_arrays_of_any_shape_arrive_as_they_were(shape, dtype):
    array = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    meta, arrays = wire.decode(encoded("thing", {"a": [1, "b"]}, {"x": array, "turned": array.T}), "thing")
    assert meta == {"a": [1, "b"]}
    for name, wanted in (("x", array), ("turned", array.T)):
        assert arrays[name].dtype == wanted.dtype and arrays[name].shape == wanted.shape
        assert np.array_equal(arrays[name], wanted)


def test_a_large_array_that_repeats_itself_is_sent_in_less_and_arrives_whole():
    plain, packed = (encoded("thing", {}, {"rows": ROWS}, compress) for compress in ((), ("rows",)))
    assert len(packed) < len(plain) / 10
    assert np.array_equal(wire.decode(packed, "thing")[1]["rows"], ROWS)


def test_what_does_not_shrink_or_is_small_is_sent_as_it_is():
    for array in (NOISE, ROWS[:100]):
        assert encoded("thing", {}, {"x": array}, {"x"}) == encoded("thing", {}, {"x": array})


def test_a_flipped_bit_anywhere_is_noticed():
    message = encoded("thing", {"a": 1}, {"rows": ROWS, "noise": NOISE[:64]}, {"rows"})
    for at in [0, 5, 9, 17, 25, 60, len(message) // 2, len(message) - 20]:
        broken = bytearray(message)
        broken[at] ^= 1
        with pytest.raises(WireError):
            wire.decode(bytes(broken), "thing")


def test_a_compressed_array_of_another_size_than_it_says_is_refused():
    honest = encoded("thing", {}, {"rows": ROWS}, {"rows"})
    header_bytes = int.from_bytes(honest[16:20], "little")
    lying = honest[20 : 20 + header_bytes].replace(b"\xcd\x10\x00", b"\xcd\x20\x00", 1)  # 4096 rows become 8192
    body = honest[16:20] + lying + honest[20 + header_bytes :]
    message = honest[:8] + wire.xxhash.xxh3_64_digest(body) + body
    assert lying != honest[20 : 20 + header_bytes]
    with pytest.raises(WireError, match="does not fit the message"):
        wire.decode(message, "thing")
