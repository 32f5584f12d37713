"""Large memory is there before it is handed out, and is used again once nobody can see it any more, not before."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest

from slipstream.transport import buffers
from slipstream.transport.buffers import KEPT, room

SIZE = 48 << 20


@pytest.fixture(autouse=True)
def _nothing_free(monkeypatch):
    monkeypatch.setattr(buffers, "_FREE", tuple(type(queue)() for queue in buffers._FREE))


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="page faults of a thread are counted on Linux alone")
def test_writing_to_it_brings_no_page_in():
    memory, fresh = np.frombuffer(room(SIZE), np.uint8), np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    assert _faults(memory) < SIZE >> 23 < _faults(fresh)


def test_what_nobody_views_any_more_is_used_again():
    first = room(SIZE)
    array = np.frombuffer(first, np.int32).reshape(2, -1)[1]
    first[:] = b"\x07" * SIZE
    del first
    other = room(SIZE)
    other[:] = bytes(SIZE)
    assert (array == 0x07070707).all()
    del array
    assert room(SIZE - 1)[1] == 7  # fresh memory is zero


def test_a_larger_one_than_fits_is_another_one():
    room(SIZE)
    free = buffers._FREE[(SIZE - 1).bit_length()]
    assert free.qsize() == 1
    assert len(room(2 * SIZE)) == 2 * SIZE
    assert free.qsize() == 1


def test_few_are_kept():
    many = [room(1 << 13) for _ in range(2 * KEPT)]
    many.clear()
    assert buffers._FREE[13].qsize() == KEPT


def _faults(array: np.ndarray) -> int:
    """Pages that come while it is written to."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array.fill(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
