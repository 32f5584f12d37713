"""Memory that the two sides of a handoff share when both are on one host: an anonymous file that the decode engine makes and the prefill
engine opens by way of /proc.

Nothing has a name, so nothing is left over however either process ends: the kernel frees the memory with its last user. Whether the
other side is on this host is found out by trying: it is when it can open the file and finds the nonce there, a number that nobody else
knows. Linux only; elsewhere `make` returns None and the bytes take the socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat

import numpy as np

from slipstream.engine.handoff.messages import SegmentOffer

HEAD_BYTES = 64
"""In front of the rows: the nonce, and padding to a cache line."""
NONCE_BYTES = 16
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


class Segment:
    """`rows` is [count, bytes of a block], uint8, writable on both sides."""

    def __init__(self, fd: int, count: int, block_bytes: int) -> None:
        self._fd = fd
        self._nonce = b""
        self.size = HEAD_BYTES + count * block_bytes
        self._map = mmap.mmap(fd, self.size)
        self.rows = np.frombuffer(self._map, np.uint8, count * block_bytes, HEAD_BYTES).reshape(count, block_bytes)

    @classmethod
    def make(cls, count: int, block_bytes: int) -> Segment | None:
        """New memory, zeroed, that can never shrink: who maps it cannot be made to fault. None where the system has no such thing."""
        if not hasattr(os, "memfd_create"):
            return None
        fd = os.memfd_create("slipstream-handoff", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, HEAD_BYTES + count * block_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            segment = cls(fd, count, block_bytes)
        except OSError:
            os.close(fd)
            raise
        segment._nonce = segment._map[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        return segment

    @classmethod
    def open(cls, offer: SegmentOffer, count: int, block_bytes: int) -> Segment | None:
        """The offered memory; None when it is not here: on another host, of another user, gone, or not what was said."""
        if not _PATH.fullmatch(offer.path) or len(offer.nonce) != NONCE_BYTES or offer.size != HEAD_BYTES + count * block_bytes:
            return None
        try:
            fd = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != offer.size or os.pread(fd, NONCE_BYTES, 0) != offer.nonce:
                return None
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return None
            segment = cls(fd, count, block_bytes)
            segment._fd = -1  # the mapping is enough
            return segment
        except OSError:  # a file without seals, or no memory to map
            return None
        finally:
            os.close(fd)

    def offer(self) -> SegmentOffer:
        """How the other side finds it, for as long as it is not closed here."""
        return SegmentOffer(f"/proc/{os.getpid()}/fd/{self._fd}", self._nonce, self.size)

    def close(self) -> None:
        """Give up the file; `rows` stay as long as somebody holds them."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
