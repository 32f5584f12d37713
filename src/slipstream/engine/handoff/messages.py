"""What the two sides of a handoff say to each other: one connection carries one handoff, and closing it ends the handoff.

    decode engine                         prefill engine
                                    <-    challenge   a number
    hello   proof, layout, weights  ->
                                    <-    welcome     proof, or refused (code, message)
    fetch   tokens, which blocks    ->
                                    <-    accepted    by shared memory or not; or refused
                                    <-    piece       byte range of some blocks, the bytes behind it     (socket only)
                                    <-    ready       these blocks are complete; a checksum each
                                    <-    end         no further block will come

Each side proves that it has the run's token before the other says anything of worth; the token itself never travels. What follows is
neither secret nor signed: the network between engines is trusted as it is for the prompts that arrive by HTTP.

Each message is a `transport.wire` message (magic, schema version, checksum) behind its length in 4 bytes, little endian. Only the bytes
behind a `piece` are bare: the checksums of `ready` cover them. Nothing is pickled, nothing is allocated before its length is checked.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from slipstream.errors import WireError
from slipstream.transport.wire import decode, encode

HELLO_BYTES = 16 << 10
"""Longest message of somebody who has not proved anything yet."""
NONCE_BYTES = 16
ANSWER_BYTES = 4 << 20
"""Longest message of a prefill engine: a `ready` with 24 bytes a block."""
FETCH_OVERHEAD_BYTES = 16 << 10
_LENGTH = 4
_MOST_BUFFERS = 512
"""Of one sendmsg; Linux takes 1024."""


class HandoffError(Exception):
    """A handoff ended before its time. `code` counts and tells apart; the text is for the log."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Challenge(msgspec.Struct):
    nonce: bytes


class Hello(msgspec.Struct):
    """Who asks: proof of the token, a challenge for the other side, for blocks of which form, to be used by which weights."""

    proof: bytes
    nonce: bytes
    layout: str
    version: int
    fingerprint: str


class Welcome(msgspec.Struct):
    proof: bytes


class SegmentOffer(msgspec.Struct):
    """Shared memory that the decode engine has made for the blocks; see `segment`."""

    path: str
    nonce: bytes
    size: int


class Fetch(msgspec.Struct):
    """Blocks `first .. first + count - 1` of the tokens that come along, without the last one. The last block need not be full."""

    id: str
    salt: int
    first: int
    count: int
    segment: SegmentOffer | None = None


class Accepted(msgspec.Struct):
    shared: bool


class Refused(msgspec.Struct):
    """`code`: token, layout, weights, version, busy, request."""

    code: str
    message: str


class Piece(msgspec.Struct):
    """Bytes `start .. stop - 1` of each of `count` blocks, which follow, block by block."""

    first: int
    count: int
    start: int
    stop: int


class Ready(msgspec.Struct):
    """Blocks `first ..` (counted from the first one asked for) are complete: xxh3-64 of each."""

    first: int
    sums: list[bytes]


class End(msgspec.Struct):
    """`reason` is empty when every block was sent."""

    reason: str = ""


M = TypeVar("M", bound=msgspec.Struct)
_KINDS: dict[str, type[msgspec.Struct]] = {
    f"handoff_{cls.__name__.lower()}": cls for cls in (Challenge, Hello, Welcome, Fetch, Accepted, Refused, Piece, Ready, End)
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


@dataclass
class Line:
    """A connected socket with a deadline for everything that is done on it."""

    sock: socket.socket
    deadline: float
    """On time.monotonic's clock."""

    def send(self, message: msgspec.Struct, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Raises HandoffError (away, deadline)."""
        pieces = encode(_NAMES[type(message)], msgspec.to_builtins(message, builtin_types=(bytes,)), arrays or {})
        self._write([sum(memoryview(piece).nbytes for piece in pieces).to_bytes(_LENGTH, "little"), *pieces])

    def send_rows(self, rows: np.ndarray) -> None:
        """The bytes of [n, bytes] row by row; rows need not touch each other."""
        for i in range(0, len(rows), _MOST_BUFFERS):
            self._write([row.data for row in rows[i : i + _MOST_BUFFERS]])

    def receive(self, most_bytes: int, *expected: type[M]) -> tuple[M, dict[str, np.ndarray]]:
        """The next message, which must be one of these.

        Raises HandoffError (away, deadline, garbage); a `Refused` that was not expected is raised with its code.
        """
        size = int.from_bytes(self._read(_LENGTH), "little")
        if not 0 < size <= most_bytes:
            raise HandoffError("garbage", f"a message of {size} bytes was announced, at most {most_bytes} were expected")
        body = self._read(size)
        try:
            kind, meta, arrays = _decode(memoryview(body))
            message = msgspec.convert(meta, kind)
        except (WireError, msgspec.ValidationError) as error:
            raise HandoffError("garbage", f"not a message of a handoff: {error}") from None
        if isinstance(message, Refused) and Refused not in expected:
            raise HandoffError(message.code, message.message)
        if not isinstance(message, expected):
            names = " or ".join(cls.__name__ for cls in expected)
            raise HandoffError("garbage", f"a {type(message).__name__} message where {names} was expected")
        return message, arrays

    def receive_rows(self, rows: np.ndarray) -> None:
        """Fill [n, bytes] row by row."""
        for row in rows:
            self._fill(memoryview(row))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while len(view):
            with self._guarded():
                got = self.sock.recv_into(view)
            if not got:
                raise HandoffError("away", "the other side closed the connection")
            view = view[got:]

    def _write(self, buffers: Sequence[bytes | memoryview]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        while views:
            with self._guarded():
                sent = self.sock.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    @contextlib.contextmanager
    def _guarded(self):
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise HandoffError("deadline", "the deadline of the handoff has passed")
        self.sock.settimeout(left)
        try:
            yield
        except TimeoutError:
            raise HandoffError("deadline", "the deadline of the handoff has passed") from None
        except OSError as error:
            raise HandoffError("away", f"the connection broke: {error.strerror or error}") from None


def _decode(body: memoryview) -> tuple[type[msgspec.Struct], dict[str, Any], dict[str, np.ndarray]]:
    for kind, cls in _KINDS.items():
        if kind.encode() in bytes(body[:96]):  # the header comes first and its kind is the first thing in it; `decode` checks
            meta, arrays = decode(body, kind)
            return cls, meta, arrays
    raise WireError(f"{len(body)} bytes that begin with {bytes(body[:16])!r}")
