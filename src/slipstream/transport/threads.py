"""Work on many bytes, away from the event loop.

Copying, hashing or compressing the routing rows of one long rollout (78 MB for 131,072 tokens, 75 MoE layers and 8 experts) takes long
enough that everybody else on the loop would notice. numpy, xxhash and zstandard let go of the interpreter while they work, so a thread
helps. Small work is done at once: a thread would cost more, and a simulation stays deterministic.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""About a millisecond of copying and hashing."""
_WORKERS = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), thread_name_prefix="large")
"""Of half the processors, so that the loop finds a free one."""


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """What `work` returns; in a thread when it is about LARGE_BYTES or more."""
    return work() if num_bytes < LARGE_BYTES else await asyncio.get_running_loop().run_in_executor(_WORKERS, work)
