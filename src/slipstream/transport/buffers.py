"""Large memory that is used again.

A large array is fresh memory of the kernel. It comes page by page, each when it is first written to, and goes when the array does. A page
of 2 MiB takes 0.1 ms to come, and 5 ms in a virtual machine whose free memory the host had taken. Giving memory back is no better there:
while the host takes it, every process of the machine stands still, for 20 to 100 ms. So what held one body or one row of a batch holds the
next.
"""

from __future__ import annotations

import mmap
import weakref
from queue import Empty, SimpleQueue

import numpy as np

KEPT = 4
"""Free buffers of each size (a power of two) that wait to be used again."""
_FREE: tuple[SimpleQueue[np.ndarray], ...] = tuple(SimpleQueue() for _ in range(64))
"""By the logarithm of their size. This queue may be put into while the same thread takes from it: a view may go at any moment."""


def room(size: int) -> memoryview:
    """`size` writable bytes of any content, in memory that is there. They are used again once nothing views them any more.

    Takes as long as the pages that are not there yet: call it off the event loop.
    """
    order = (size - 1).bit_length()
    try:
        buffer = _FREE[order].get_nowait()
    except Empty:
        buffer = np.empty(1 << order, np.uint8)
    buffer[: size : mmap.PAGESIZE] = 0
    lent = buffer[:size]
    weakref.finalize(lent, _take_back, order, buffer).atexit = False
    return lent.data  # keeps `lent`, as does every array over it


def _take_back(order: int, buffer: np.ndarray) -> None:
    if _FREE[order].qsize() < KEPT:
        _FREE[order].put(buffer)
