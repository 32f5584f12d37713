"""Wakes the ranks of a group: a datagram that says for which vote they are wanted.

Ranks that have nothing to do sleep outside of any exchange, for as long as it takes; the one that gets a request rings before it waits for
the others. A ring for a vote that is over means nothing, so it may come late, or twice. On loopback a datagram to a bound socket arrives.
"""

from __future__ import annotations

import secrets
import socket
import struct

from slipstream.errors import ConfigError
from slipstream.parallel.wide import WideGroup

_RING = struct.Struct("!16sQ")
"""A secret of the group, which keeps other programs of the machine from waking it; number of the vote."""


class Bell:
    """`fileno` is readable when somebody rang; then `heard` says for which vote at most. Made by all ranks together."""

    def __init__(self, group: WideGroup, host: str) -> None:
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
            self._socket.bind(address)
        except OSError as error:
            raise ConfigError(f"engine.host = {host!r}: cannot be used between the ranks of engine.ep: {error.strerror or error}") from None
        self._socket.setblocking(False)
        told = group.exchange((self._socket.getsockname(), secrets.token_bytes(16)))
        self._others = [address for rank, (address, _) in enumerate(told) if rank != group.rank]
        self._secret = told[0][1]

    def fileno(self) -> int:
        return self._socket.fileno()

    def ring(self, vote: int) -> None:
        for address in self._others:
            self._socket.sendto(_RING.pack(self._secret, vote), address)

    def heard(self) -> int:
        """The latest vote that anybody rang for since the last call; 0: none."""
        latest = 0
        while True:
            try:
                message = self._socket.recv(_RING.size + 1)
            except BlockingIOError:
                return latest
            except OSError:  # a rank that has ended answers that nobody listens
                continue
            if len(message) == _RING.size and secrets.compare_digest(message[:16], self._secret):
                latest = max(latest, _RING.unpack(message)[1])

    def close(self) -> None:
        self._socket.close()
