"""The prefill side of handoffs on the network: takes a decode engine's request, has the engine prefill it, sends the blocks as they come.

One thread accepts, one more serves each connection, so that bytes move while the engine computes; the engine is asked through its event
loop. A connection that ends, for whatever reason, ends its prefill. Nobody gets anything without the run's token.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import select
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from slipstream.config.disaggregation import DisaggregationConfig
from slipstream.engine.handoff.exports import Export
from slipstream.engine.handoff.handshake import challenge
from slipstream.engine.handoff.messages import FETCH_OVERHEAD_BYTES, Accepted, End, Fetch, HandoffError, Hello, Line, Piece, Ready, Refused
from slipstream.engine.handoff.segment import Segment
from slipstream.errors import ConfigError, EngineError
from slipstream.types import GenerateRequest, Sampling

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
HELLO_S = 30.0
"""Time for somebody who has connected to say who they are."""
POLL_S = 0.25
"""How often a quiet handoff looks whether the other side is still there."""


@dataclass(frozen=True, slots=True)
class Form:
    """Of the blocks of an engine. `layout` names everything that both sides must have in common to understand each other's."""

    layout: str
    block_bytes: int
    block_tokens: int


class Prefiller(Protocol):
    """What the listener needs of an engine. `EngineDriver` is one."""

    async def prefill(self, request: GenerateRequest, export: Export) -> None:
        """Returns when the request has ended. Cancelling aborts it. Raises EngineError."""
        ...

    def weights(self) -> tuple[int, str]:
        """Live version and fingerprint."""
        ...


class HandoffListener:
    """`start` it in the engine's event loop; `close` ends every handoff."""

    def __init__(
        self, prefiller: Prefiller, form: Form, seq_len: int, token: str, config: DisaggregationConfig, counts: Counter[str]
    ) -> None:
        """Adds to `counts`: served, refused and dropped handoffs, sent_bytes."""
        self._prefiller, self._form, self._seq_len, self._token = prefiller, form, seq_len, token
        self._may_share, self._timeout_s = config.transport != "socket", config.timeout_s
        self._counts = counts
        self._counting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: socket.socket | None = None
        self._connections: set[socket.socket] = set()

    def start(self, host: str, port: int) -> str:
        """Listen; the address, 'host:port'. Raises ConfigError when that is not possible."""
        self._loop = asyncio.get_running_loop()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                f"engine.host = {host!r}, engine.disaggregation.port = {port}: cannot listen there for handoffs: {error.strerror or error}"
            ) from None
        threading.Thread(target=self._accept, args=(self._server,), name="handoff-accept", daemon=True).start()
        name, port = self._server.getsockname()[:2]
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    def close(self) -> None:
        """Stop listening and cut every connection; their prefills are aborted."""
        if self._server is not None:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _count(self, **counts: int) -> None:
        with self._counting:
            self._counts.update(counts)

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, address = server.accept()
            except OSError:
                return  # closed
            if len(self._connections) >= MOST_CONNECTIONS:
                connection.close()
                continue
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection, address[0]), name="handoff", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        line = Line(connection, time.monotonic() + HELLO_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handoff = _Handoff(*self._agree(line))
            line.deadline = time.monotonic() + self._timeout_s
            self._run(line, handoff)
        except HandoffError as error:
            self._count(dropped=1)
            log.info("a handoff to %s ended early: %s", peer, error)
        except Exception:
            self._count(dropped=1)
            log.exception("a handoff to %s failed", peer)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _agree(self, line: Line) -> tuple[Fetch, np.ndarray, Segment | None]:
        """Who asks and for what. Raises HandoffError after telling them why not."""
        hello, welcome = challenge(line, self._token)
        if welcome is None:
            raise self._refuse(line, "token", "wrong token: only engines of this run may ask for blocks")
        if hello.layout != self._form.layout:
            raise self._refuse(
                line,
                "layout",
                f"blocks of another form: this engine has {self._form.layout}, yours {hello.layout} (model, [engine])",
            )
        line.send(welcome)
        fetch, arrays = line.receive(4 * self._seq_len + FETCH_OVERHEAD_BYTES, Fetch)
        tokens_T = arrays.get("tokens", np.zeros(0, np.int32))
        most = (fetch.first + fetch.count) * self._form.block_tokens + 1
        fits = tokens_T.ndim == 1 and most - self._form.block_tokens < len(tokens_T) <= most and len(tokens_T) < self._seq_len
        if fetch.first < 0 or fetch.count < 1 or tokens_T.dtype != np.int32 or not fits:
            raise self._refuse(
                line,
                "request",
                f"blocks {fetch.first} + {fetch.count} with {tokens_T.shape} tokens of {tokens_T.dtype}: expected up to {most} int32 "
                f"tokens that end in the last block or one behind it, and room for one more in a context of {self._seq_len}",
            )
        self._check_weights(line, hello, fetch.salt)
        offer = fetch.segment if self._may_share else None
        return fetch, tokens_T, Segment.open(offer, fetch.count, self._form.block_bytes) if offer is not None else None

    def _check_weights(self, line: Line, hello: Hello, salt: int) -> None:
        """Blocks of an older policy than the salt are what the salt is there to keep away; the same number must be the same weights."""
        version, fingerprint = self._prefiller.weights()
        if version == hello.version and fingerprint != hello.fingerprint:
            raise self._refuse(line, "weights", f"other weights: version {version} is {fingerprint} here and {hello.fingerprint} there")
        if version < salt:
            raise self._refuse(line, "version", f"version {version} is live here; blocks for salt {salt} need that version or a newer one")

    def _refuse(self, line: Line, code: str, message: str) -> HandoffError:
        self._count(refused=1)
        with suppress(HandoffError):
            line.send(Refused(code, message))
        return HandoffError(code, f"refused: {message}")

    def _run(self, line: Line, handoff: _Handoff) -> None:
        shared = handoff.segment is not None
        rows = handoff.segment.rows if handoff.segment is not None else np.empty((handoff.fetch.count, self._form.block_bytes), np.uint8)
        line.send(Accepted(shared))
        assert self._loop is not None
        export = Export(handoff.fetch.first, rows, handoff.events.put)
        future = asyncio.run_coroutine_threadsafe(self._prefiller.prefill(handoff.request(), export), self._loop)
        future.add_done_callback(lambda _: handoff.events.put(None))
        try:
            self._send_blocks(line, handoff, rows, shared)
            self._count(served=1)
            line.send(End(_reason(future)))
        finally:
            future.cancel()

    def _send_blocks(self, line: Line, handoff: _Handoff, rows: np.ndarray, shared: bool) -> None:
        """Until every block is sent or the prefill has ended. Raises HandoffError when the decode engine is gone or the time is up."""
        sent = 0
        while sent < len(rows):
            try:
                event = handoff.events.get(timeout=POLL_S)
            except queue.Empty:
                _check_there(line)
                continue
            if event is None:
                return
            if isinstance(event, Piece):
                if not shared:
                    line.send(event)
                    line.send_rows(rows[event.first : event.first + event.count, event.start : event.stop])
                continue
            self._count(sent_bytes=(event - sent) * self._form.block_bytes)
            line.send(Ready(sent, [xxhash.xxh3_64_digest(row) for row in rows[sent:event]]))
            sent = event


class _Handoff:
    """One fetch on its way."""

    def __init__(self, fetch: Fetch, tokens_T: np.ndarray, segment: Segment | None) -> None:
        self.fetch, self.segment = fetch, segment
        self.events: queue.SimpleQueue[Piece | int | None] = queue.SimpleQueue()
        self._tokens_T = tokens_T.copy()

    def request(self) -> GenerateRequest:
        """Greedy and with a seed: it must not touch the engine's own random numbers. Its one token is nobody's."""
        return GenerateRequest(
            f"handoff/{self.fetch.id}/{secrets.token_hex(4)}",
            self._tokens_T,
            Sampling(temperature=0.0, max_tokens=1, seed=0),
            self.fetch.salt,
            routing_from=len(self._tokens_T),
        )


def _reason(future: Future[None]) -> str:
    """Why a prefill that has ended gave fewer blocks than asked for; '' when it did not, or has not ended."""
    if not future.done():
        return ""
    if future.cancelled():
        return "the prefill was cancelled"
    error = future.exception()
    if error is not None and not isinstance(error, EngineError):
        raise error
    return str(error) if error is not None else ""


def _check_there(line: Line) -> None:
    """Raises HandoffError when the decode engine has closed its end, or the time is up. It has nothing to say meanwhile."""
    if time.monotonic() > line.deadline:
        raise HandoffError("deadline", "the deadline of the handoff has passed")
    readable, _, _ = select.select([line.sock], [], [], 0)
    if not readable:
        return
    try:
        said = line.sock.recv(1)
    except OSError as error:
        raise HandoffError("away", f"the connection broke: {error.strerror or error}") from None
    if said:
        raise HandoffError("garbage", "the decode engine sent something after its request")
    raise HandoffError("away", "the decode engine is gone or has lost interest")
