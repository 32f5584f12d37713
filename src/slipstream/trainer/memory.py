"""Gives memory that the C library keeps for itself back to the system.

Packed rows have ever new lengths, and a freed tensor of one length rarely fits the next: measured once by hand, after 16 rows of
SmolLM2-135M a process held 3.6 GB, with trimming 2.4 GB. A trim takes 20 to 100 ms there, so it is done between steps, and not more often
than EVERY_S.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache

EVERY_S = 5.0


class Trimmer:
    """Trims now and then; does nothing where the C library has no `malloc_trim` (only glibc has)."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def trim(self) -> bool:
        """Whether it was time, and something to do it with."""
        now, function = time.monotonic(), _malloc_trim()
        if function is None or now - self._last < EVERY_S:
            return False
        function(0)
        self._last = now
        return True


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return function
