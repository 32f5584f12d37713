"""The decode side of a handoff on the network: asks one prefill engine for blocks and receives them, in a thread of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import xxhash

from slipstream.config.disaggregation import Transport
from slipstream.engine.blocks import version_of
from slipstream.engine.handoff.handshake import Asker, introduce
from slipstream.engine.handoff.messages import ANSWER_BYTES, Accepted, End, Fetch, HandoffError, Line, Piece, Ready
from slipstream.engine.handoff.segment import Segment

CONNECT_S = 2.0


class Reception:
    """Blocks on their way. `rows[:complete]` are complete and checked at every moment, and stay so however it ends."""

    def __init__(
        self, fetch: Fetch, block_bytes: int, transport: Transport, deadline: float, live: Callable[[], int], told: Callable[[], None]
    ) -> None:
        """`deadline` on time.monotonic's clock. `told` is called, in the receiving thread, when `complete` or `done` has changed.

        Blocks that a policy version before `fetch.salt` wrote are not taken: that is what the salt is for. Nor are those of one that is
        newer than the `live()` one here: the peer has been given new weights a moment earlier.
        """
        self.rows = np.zeros((0, block_bytes), np.uint8)
        self.complete = 0
        self.done = False
        self.shared = False
        self.error: HandoffError | None = None
        """Why `done` came before all blocks had."""
        self._fetch, self._deadline, self._told = fetch, deadline, told
        self._transport: Transport = transport
        self._live = live
        self._segment: Segment | None = None
        self._sock: socket.socket | None = None
        self._cancelled = False

    def run(self, address: str, asker: Asker, tokens_T: np.ndarray) -> None:
        """Fetch from the engine that listens at `address`. Returns when it is over; what went wrong is in `error`."""
        try:
            self._segment = _segment(self._fetch.count, self.rows.shape[1], self._transport)
            self._fetch.segment = self._segment.offer() if self._segment is not None else None
            with _connect(address, self._deadline) as self._sock:
                line = Line(self._sock, self._deadline)
                if self._cancelled:  # before there was a connection to close
                    raise HandoffError("cancelled", "nobody wants it any more")
                introduce(line, asker)
                line.send(self._fetch, {"tokens": tokens_T})
                self._receive(line)
        except HandoffError as error:
            self.error = error
        except Exception as error:  # the thread must not end without a word: somebody waits for `done`
            self.error = HandoffError("bug", f"{type(error).__name__}: {error}")
        finally:
            if self._segment is not None:
                self._segment.close()
            self.done = True
            self._told()

    def cancel(self) -> None:
        """From any thread: nobody wants the rest. Closes the connection, upon which the prefill engine drops the work."""
        self._cancelled = True
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _receive(self, line: Line) -> None:
        accepted, _ = line.receive(ANSWER_BYTES, Accepted)
        self.shared = accepted.shared
        if self._transport == "shared_memory" and not self.shared:
            raise HandoffError("memory", "it cannot share memory with this process, and engine.disaggregation.transport asks for that")
        if self.shared and self._segment is None:
            raise HandoffError("garbage", "it means to use shared memory that nobody offered")
        size = self.rows.shape[1]
        self.rows = self._segment.rows if self.shared and self._segment else np.empty((self._fetch.count, size), np.uint8)
        while self.complete < self._fetch.count:
            if self._cancelled:
                raise HandoffError("cancelled", "nobody wants the rest")
            message, _ = line.receive(ANSWER_BYTES, Piece, Ready, End)
            if isinstance(message, Piece):
                line.receive_rows(self._place(message))
            elif isinstance(message, Ready):
                self._check(message)
                self._told()
            else:
                raise HandoffError("short", f"it gave {self.complete} of {len(self.rows)} blocks: {message.reason or 'no reason given'}")

    def _place(self, piece: Piece) -> np.ndarray:
        count, size = self.rows.shape
        if self.shared or not (piece.first >= 0 and 1 <= piece.count <= count - piece.first and 0 <= piece.start < piece.stop <= size):
            raise HandoffError("garbage", f"{piece} does not fit {count} blocks of {size} bytes")
        if piece.first < self.complete:
            raise HandoffError("garbage", f"{piece} would change a block that was complete")
        return self.rows[piece.first : piece.first + piece.count, piece.start : piece.stop]

    def _check(self, ready: Ready) -> None:
        if ready.first != self.complete or len(ready.sums) > len(self.rows) - self.complete:
            raise HandoffError("garbage", f"blocks {ready.first} + {len(ready.sums)} are said to be ready after {self.complete}")
        for expected in ready.sums:
            row = self.rows[self.complete]
            if xxhash.xxh3_64_digest(row) != expected:
                raise HandoffError("damaged", f"block {self.complete} has another checksum than it was sent with")
            salt, version, live = self._fetch.salt, version_of(row), self._live()
            if not salt <= version <= live:
                raise HandoffError(
                    "version", f"policy version {version} wrote block {self.complete}; expected {salt} (salt) to {live} (live)"
                )
            self.complete += 1


def _segment(count: int, block_bytes: int, transport: Transport) -> Segment | None:
    """Raises HandoffError where it must be shared memory and there is none."""
    if transport == "socket":
        return None
    try:
        segment = Segment.make(count, block_bytes)
    except OSError as error:
        if transport == "auto":
            return None
        raise HandoffError("memory", f"no shared memory for {count} blocks: {error.strerror or error}") from None
    if segment is None and transport == "shared_memory":
        raise HandoffError("memory", "this system has no memory that processes can share by handle; set engine.disaggregation.transport")
    return segment


def _connect(address: str, deadline: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    left = min(CONNECT_S, deadline - time.monotonic())
    if not port.isdigit():
        raise HandoffError("away", f"{address!r} is not an address like 127.0.0.1:4711")
    if left <= 0:
        raise HandoffError("deadline", "the deadline of the handoff has passed before it began")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
    except OSError as error:
        raise HandoffError("away", f"nobody answers: {error.strerror or error}") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
