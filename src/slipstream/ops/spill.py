"""Tensors in a file instead of in memory: what is needed rarely, and can be written and read back while something else computes.

The file is mapped, so a tensor of it is used like any other; `forget` gives its memory back (the kernel writes it out by and by), `expect`
has the kernel read it ahead. The file has no name in the folder and is gone with the process.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import ConfigError, StateError

PAGE = mmap.PAGESIZE


class Spilled:
    """Room for one tensor, of which the shape may change from use to use."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Raises OSError: the disk is full, or the folder cannot be written."""
        self.num_bytes = -(-max(num_bytes, 1) // PAGE) * PAGE
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, self.num_bytes)  # a full disk is an error here, not a signal at the first write
            self._map = mmap.mmap(file.fileno(), self.num_bytes)

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """What was last written, seen as `shape` and `dtype`; shares memory with the file."""
        count = math.prod(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)

    def forget(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def expect(self) -> None:
        self._map.madvise(mmap.MADV_WILLNEED)


class Shelf:
    """Tensors that are put away once and taken back once, in whatever order: activations between forward and backward pass.

    Writing happens in a thread; at most `in_flight` tensors wait for it, then `put` does. Taking one back expects the one that was put
    before it, which a backward pass wants next.
    """

    def __init__(self, folder: Path, in_flight: int = 1) -> None:
        """Raises ConfigError: the folder cannot hold files."""
        if not os.access(folder, os.W_OK):
            raise ConfigError(
                f"activations cannot be offloaded to trainer.offload.folder = {folder}: it is not a folder that can be written"
            )
        self._folder, self._free, self._last = folder, list[Spilled](), None
        self._room = threading.Semaphore(in_flight)
        self._writer = ThreadPoolExecutor(1, "spill")
        self.bytes_written = 0

    def put(self, x: Tensor) -> Put:
        """Raises OSError: the disk is full."""
        self.bytes_written += x.nbytes
        self._room.acquire()
        slot = self._slot(x.nbytes)
        self._last = Put(slot, x.shape, x.dtype, self._writer.submit(self._write, slot, x.detach()), self._last)
        return self._last

    def take(self, put: Put) -> Tensor:
        """A copy of what was put. Raises StateError: it was taken before."""
        if put.taken:
            raise StateError("an offloaded activation is wanted twice, and its place may hold another one by now")
        put.written.result()
        if put.before is not None and not put.before.taken:
            put.before.slot.expect()
        x = put.slot.tensor(put.shape, put.dtype).clone()
        put.slot.forget()
        put.taken, put.before = True, None
        self._free.append(put.slot)
        return x

    def _slot(self, num_bytes: int) -> Spilled:
        """The smallest free one that is large enough, or a new one; too small ones then go, so that files do not pile up as rows grow."""
        fitting = [slot for slot in self._free if slot.num_bytes >= num_bytes]
        slot = min(fitting, key=lambda slot: slot.num_bytes, default=None)
        if slot is None:
            self._free.clear()
            return Spilled(self._folder, num_bytes)
        self._free.remove(slot)
        return slot

    def _write(self, slot: Spilled, x: Tensor) -> None:
        try:
            slot.tensor(x.shape, x.dtype).copy_(x)
            slot.forget()
        finally:
            self._room.release()


@dataclass(slots=True)
class Put:
    """A tensor on a `Shelf`."""

    slot: Spilled
    shape: torch.Size
    dtype: torch.dtype
    written: Future[None]
    before: Put | None
    taken: bool = False
