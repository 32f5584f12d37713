"""Blocks between engines: what arrives is what was computed, and everything that can go wrong on the way ends as a shorter handoff."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import NamedTuple

import numpy as np
import pytest

from slipstream.config.disaggregation import DisaggregationConfig, Transport
from slipstream.engine.handoff.client import Reception
from slipstream.engine.handoff.exports import Export
from slipstream.engine.handoff.handshake import Asker, proof
from slipstream.engine.handoff.listener import Form, HandoffListener
from slipstream.engine.handoff.messages import Accepted, Challenge, Fetch, HandoffError, Hello, Line, Piece, Ready, Welcome
from slipstream.engine.handoff.peers import FIRST_PAUSE_S, WRONG_PAUSE_S, Peers
from slipstream.engine.handoff.segment import Segment
from slipstream.engine.handoff.token import run_token
from slipstream.engine.local import local_engine
from slipstream.errors import EngineUnavailable
from slipstream.serving.keys import extend_keys
from slipstream.types import GenerateRequest
from tests.unit.engine.helpers import SEQ_LEN, ask, make_engine, prompt, run
from tests.waiting import HUNG_S, until

TOKEN = "the run's token"
ASKER = Asker(TOKEN, "blocks of 8", 0, "f")
SIZE = 24


class FakePrefiller:
    """Fills block i with the byte i + 1 and policy version `version`, in two pieces a block, when told to."""

    def __init__(self, version: int = 0, blocks: int = 99, fingerprint: str = "f", stuck_after: int = 99) -> None:
        self.version, self.blocks, self.fingerprint, self.stuck_after = version, blocks, fingerprint, stuck_after
        self.requests: list[GenerateRequest] = []
        self.cancelled = threading.Event()
        self.error: Exception | None = None

    def weights(self) -> tuple[int, str]:
        return self.version, self.fingerprint

    async def prefill(self, request: GenerateRequest, export: Export) -> None:
        self.requests.append(request)
        try:
            for i in range(min(self.blocks, len(export.rows))):
                if i == self.stuck_after:
                    await asyncio.Event().wait()
                export.rows[i] = i + 1
                export.rows[i, -4:] = np.frombuffer(self.version.to_bytes(4, "little"), np.uint8)
                export.tell(Piece(i, 1, 0, 10))
                export.tell(Piece(i, 1, 10, SIZE))
                export.tell(i + 1)
            if self.error is not None:
                raise self.error
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Listening(NamedTuple):
    counts: Counter[str]
    close: Callable[[], None]


@asynccontextmanager
async def listening(prefiller: FakePrefiller, layout: str = "blocks of 8", shared: bool = True) -> AsyncIterator[tuple[Listening, str]]:
    config = DisaggregationConfig(transport="auto" if shared else "socket", timeout_s=HUNG_S)
    listener = HandoffListener(prefiller, Form(layout, SIZE, 4), SEQ_LEN, TOKEN, config, counts := Counter())
    address = listener.start("127.0.0.1", 0)
    try:
        yield Listening(counts, listener.close), address
    finally:
        listener.close()


def fetching(
    count: int = 3, first: int = 0, salt: int = 0, transport: Transport = "auto", timeout_s: float = HUNG_S, told=lambda: None
) -> Reception:
    return Reception(Fetch("r", salt, first, count), SIZE, transport, time.monotonic() + timeout_s, lambda: 7, told)


async def receive(reception: Reception, address: str, asker: Asker = ASKER, blocks: int = 3) -> Reception:
    await asyncio.to_thread(reception.run, address, asker, prompt(1, blocks * 4 + 1))
    return reception


def code(reception: Reception) -> str:
    return reception.error.code if reception.error is not None else ""


@pytest.mark.parametrize(
    ("transport", "listener_shares", "is_shared"), [("auto", True, True), ("auto", False, False), ("socket", True, False)]
)
async def test_blocks_arrive_whole_by_shared_memory_or_by_the_socket(transport, listener_shares, is_shared):
    async with listening(FakePrefiller(version=7), shared=listener_shares) as (listener, address):
        got = await receive(fetching(salt=7, transport=transport), address)
    assert (code(got), got.complete, got.shared) == ("", 3, is_shared)
    assert got.rows[:, :20].tolist() == [[i + 1] * 20 for i in range(3)]
    assert listener.counts["sent_bytes"] == 3 * SIZE


async def test_shared_memory_that_was_asked_for_and_cannot_be_had_is_said_and_not_replaced():
    async with listening(FakePrefiller(), shared=False) as (_, address):
        got = await receive(fetching(transport="shared_memory"), address)
    assert code(got) == "memory" and got.complete == 0 and "engine.disaggregation.transport" in str(got.error)


async def test_the_prefill_is_asked_for_the_tokens_of_the_blocks_and_one_more():
    prefiller = FakePrefiller()
    async with listening(prefiller) as (_, address):
        await receive(fetching(count=2, first=1, salt=0), address)
    (request,) = prefiller.requests
    assert request.prompt_T.tolist() == prompt(1, 13).tolist() and request.sampling.max_tokens == 1 and request.sampling.seed == 0


async def test_a_wrong_token_is_refused_and_never_travels():
    async with listening(FakePrefiller()) as (listener, address):
        got = await receive(fetching(), address, Asker("guess", "blocks of 8", 0, "f"))
    assert code(got) == "token" and listener.counts["refused"] == 1


async def test_a_listener_without_the_token_gets_no_prompt():
    heard = []

    def impostor(line: Line) -> None:
        line.send(Challenge(b"n" * 16))
        heard.append(line.receive(1 << 16, Hello)[0])
        line.send(Welcome(b"no proof"))
        heard.append(line.sock.recv(100))

    with served_by(impostor) as address:
        got = await receive(fetching(), address)
    assert code(got) == "token" and heard[1] == b""
    assert TOKEN.encode() not in repr(heard[0]).encode()


async def test_another_model_is_refused_with_both_forms_named():
    async with listening(FakePrefiller(), layout="blocks of 9") as (_, address):
        got = await receive(fetching(), address)
    assert code(got) == "layout" and "blocks of 9" in str(got.error) and "blocks of 8" in str(got.error)


async def test_the_same_version_number_with_other_weights_is_refused():
    async with listening(FakePrefiller(fingerprint="g")) as (_, address):
        assert code(await receive(fetching(), address)) == "weights"
        assert code(await receive(fetching(), address, Asker(TOKEN, "blocks of 8", 1, "f"))) == ""  # mid-update: another number


async def test_an_engine_behind_the_salt_refuses_and_blocks_from_before_it_are_not_taken():
    prefiller = FakePrefiller(version=4)
    async with listening(prefiller) as (_, address):
        assert code(await receive(fetching(salt=5), address)) == "version"
        prefiller.weights = lambda: (5, "f")  # it says 5, and brings older blocks out of its cache
        got = await receive(fetching(salt=5), address)
    assert code(got) == "version" and got.complete == 0


async def test_blocks_of_a_version_that_is_not_live_here_yet_are_not_taken():
    async with listening(FakePrefiller(version=8)) as (_, address):
        got = await receive(fetching(salt=7), address)
    assert code(got) == "version" and "7 (live)" in str(got.error)


@pytest.mark.parametrize("bad", ["tokens", "context"])
async def test_a_request_that_does_not_fit_is_refused(bad):
    async with listening(FakePrefiller()) as (_, address):
        got = await receive(fetching(count=4 if bad == "tokens" else 40), address, blocks=3 if bad == "tokens" else 40)
    assert code(got) == "request"


async def test_what_came_before_the_prefill_failed_is_kept():
    prefiller = FakePrefiller(blocks=2)
    prefiller.error = EngineUnavailable("a step failed")
    async with listening(prefiller) as (_, address):
        got = await receive(fetching(), address)
    assert (code(got), got.complete) == ("short", 2) and "a step failed" in str(got.error)


@pytest.mark.parametrize("transport", ["auto", "socket"])
async def test_what_came_before_the_peer_was_gone_is_kept(transport):
    prefiller = FakePrefiller(stuck_after=2)
    async with listening(prefiller) as (listener, address):
        reception = fetching(transport=transport)
        task = asyncio.create_task(receive(reception, address))
        await until(lambda: reception.complete == 2)
        listener.close()
        got = await task
    assert (code(got), got.complete) == ("away", 2)
    assert [row[0] for row in got.rows[:2]] == [1, 2]


async def test_a_decode_engine_that_loses_interest_ends_the_prefill():
    prefiller = FakePrefiller(stuck_after=0)
    async with listening(prefiller) as (_, address):
        reception = fetching()
        task = asyncio.create_task(receive(reception, address))
        await until(lambda: prefiller.requests)
        reception.cancel()
        assert code(await task) in ("away", "cancelled")
        await asyncio.to_thread(prefiller.cancelled.wait, HUNG_S)
    assert prefiller.cancelled.is_set()


async def test_a_slow_peer_costs_no_more_than_the_deadline():
    prefiller = FakePrefiller(stuck_after=0)
    async with listening(prefiller) as (_, address):
        got = await receive(fetching(timeout_s=0.2), address)
    assert code(got) == "deadline" and got.complete == 0


def test_nobody_there_is_said_at_once():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    reception = fetching()
    reception.run(address, ASKER, prompt(1, 13))
    assert code(reception) == "away" and reception.done


class served_by:
    """A server that speaks to one client with `answer(line)`."""

    def __init__(self, answer: Callable[[Line], None]) -> None:
        self._answer = answer

    def __enter__(self) -> str:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def _run(self) -> None:
        sock, _ = self._server.accept()
        with sock, suppress(HandoffError):
            self._answer(Line(sock, time.monotonic() + HUNG_S))

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._server.close()


def after_welcome(answer: Callable[[Line], None]) -> Callable[[Line], None]:
    def serve(line: Line) -> None:
        line.send(Challenge(b"n" * 16))
        hello, _ = line.receive(1 << 16, Hello)
        line.send(Welcome(proof(TOKEN, "prefill", hello.nonce, b"n" * 16)))
        line.receive(1 << 16, Fetch)
        answer(line)

    return serve


def wrong_sum(line: Line) -> None:
    line.send(Accepted(False))
    line.send(Piece(0, 1, 0, SIZE))
    line.send_rows(np.ones((1, SIZE), np.uint8))
    line.send(Ready(0, [b"12345678"]))


def out_of_bounds(line: Line) -> None:
    line.send(Accepted(False))
    line.send(Piece(2, 2, 0, SIZE))


def out_of_order(line: Line) -> None:
    line.send(Accepted(False))
    line.send(Ready(1, [b"12345678"]))


def endless(line: Line) -> None:
    line._write([b"\xff\xff\xff\xff"])


def noise(line: Line) -> None:
    line._write([(40).to_bytes(4, "little"), os.urandom(40)])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (after_welcome(wrong_sum), "damaged"),
        (after_welcome(out_of_bounds), "garbage"),
        (after_welcome(out_of_order), "garbage"),
        (after_welcome(endless), "garbage"),
        (after_welcome(noise), "garbage"),
        (noise, "garbage"),
        (lambda line: line.send(Accepted(True)), "garbage"),
        (lambda line: None, "away"),
    ],
)
async def test_garbage_from_a_peer_is_noticed(answer, expected):
    with served_by(answer) as address:
        got = await receive(fetching(transport="socket"), address)
    assert code(got) == expected and got.complete == 0


async def test_garbage_on_the_listeners_socket_harms_nobody():
    async with listening(FakePrefiller()) as (listener, address):
        host, port = address.split(":")
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
            with closing(socket.create_connection((host, int(port)))) as sock:
                sock.sendall(junk)
        got = await receive(fetching(), address)
        await until(lambda: listener.counts["dropped"] == 3)
    assert code(got) == "" and got.complete == 3


# ---- shared memory ----


def test_a_segment_is_found_by_its_nonce_and_has_no_name():
    ours = Segment.make(3, SIZE)
    assert ours is not None
    before = set(os.listdir("/dev/shm"))
    theirs = Segment.open(ours.offer(), 3, SIZE)
    assert theirs is not None and set(os.listdir("/dev/shm")) == before
    theirs.rows[1] = 9
    assert ours.rows[1].tolist() == [9] * SIZE and not ours.rows[0].any()
    ours.close()


@pytest.mark.parametrize("wrong", ["nonce", "size", "path", "count"])
def test_memory_that_is_not_what_was_said_is_not_opened(wrong, tmp_path):
    ours = Segment.make(3, SIZE)
    assert ours is not None
    offer = ours.offer()
    if wrong == "nonce":
        offer.nonce = b"x" * 16
    elif wrong == "size":
        offer.size += 1
    elif wrong == "path":
        file = tmp_path / "f"
        file.write_bytes(offer.nonce.ljust(offer.size, b"\0"))
        offer.path = str(file)
    assert Segment.open(offer, 4 if wrong == "count" else 3, SIZE) is None
    ours.close()
    assert Segment.open(ours.offer(), 3, SIZE) is None


def test_the_mapped_memory_cannot_be_taken_away():
    ours = Segment.make(3, SIZE)
    assert ours is not None
    with pytest.raises(PermissionError):
        os.ftruncate(ours._fd, 10)
    ours.close()


# ---- peers and the token ----


def test_a_peer_that_failed_is_left_alone_for_longer_each_time_and_said_once(caplog):
    now = [0.0]
    peers = Peers(clock=lambda: now[0])
    for failures in (1, 2, 3):
        assert peers.may_ask("a")
        peers.failed("a", HandoffError("away", "nobody answers"))
        assert not peers.may_ask("a") and peers.may_ask("b") and peers.away == 1
        now[0] += FIRST_PAUSE_S * 2 ** (failures - 1)
    assert peers.may_ask("a") and peers.failures == {"away": 3}
    peers.succeeded("a")
    peers.failed("a", HandoffError("away", "nobody answers"))
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 2


def test_a_failure_of_one_request_leaves_the_peer_its_good_name():
    peers = Peers()
    peers.failed("a", HandoffError("version", "behind"))
    assert peers.may_ask("a") and peers.failures == {"version": 1}


def test_a_peer_with_another_model_is_loudly_left_alone(caplog):
    now = [0.0]
    peers = Peers(clock=lambda: now[0])
    peers.failed("a", HandoffError("layout", "another model"))
    now[0] = WRONG_PAUSE_S - 1
    assert not peers.may_ask("a") and caplog.records[0].levelname == "ERROR"


def test_engines_of_one_run_share_a_token_that_only_their_user_can_read(tmp_path):
    first = run_token(tmp_path)
    assert run_token(tmp_path) == first and len(first) > 30
    assert ((tmp_path / "endpoints" / "handoff-token").stat().st_mode & 0o777) == 0o600
    assert run_token(tmp_path / "other") != first


# ---- real engines ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])  # fused: a chunk at a time; float8, not fused: layer by layer
@pytest.mark.parametrize("transport", ["auto", "socket"])
async def test_what_a_decode_engine_receives_is_what_it_would_have_computed(moe_folder, dtype, transport):
    tokens_T, config = prompt(3, 61), {"dtype": dtype, "max_step_tokens": 64 if dtype == "float32" else 24, "max_running": 8}
    own = make_engine(moe_folder, **config)
    run(own, [ask("own", tokens_T, max_tokens=1)])
    found = own._scheduler.prefix.match(keys_of(tokens_T))
    whole = np.concatenate([*(own.blocks.read_layer(layer, found) for layer in range(3)), own.blocks.read_tails(found)], axis=1)
    peer = make_engine(moe_folder, **config)
    async with local_engine(peer) as driver:
        listener = HandoffListener(driver, Form("l", peer.blocks.block_bytes, 4), SEQ_LEN, TOKEN, DisaggregationConfig(), Counter())
        address = listener.start("127.0.0.1", 0)
        reception = Reception(Fetch("r", 0, 1, 14), peer.blocks.block_bytes, transport, time.monotonic() + HUNG_S, lambda: 0, lambda: None)
        await asyncio.to_thread(reception.run, address, Asker(TOKEN, "l", *driver.weights()), tokens_T)
        listener.close()
    assert (code(reception), reception.complete) == ("", 14)
    assert np.array_equal(reception.rows, whole[1:15])
    assert peer.tokens_generated == 0 and not peer.outcomes and peer.tokens_prefilled >= 60
    peer.check_integrity()


def keys_of(tokens_T: np.ndarray) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens_T[:-1], 0, 4)
    return keys


async def test_blocks_that_the_prefill_engine_has_already_are_sent_without_computing_them(moe_folder):
    tokens_T, peer = prompt(3, 61), make_engine(moe_folder)
    async with local_engine(peer) as driver:
        await driver.generate(ask("before", tokens_T, max_tokens=1))
        before = peer.tokens_prefilled
        listener = HandoffListener(driver, Form("l", peer.blocks.block_bytes, 4), SEQ_LEN, TOKEN, DisaggregationConfig(), Counter())
        address = listener.start("127.0.0.1", 0)
        reception = Reception(Fetch("r", 0, 0, 15), peer.blocks.block_bytes, "auto", time.monotonic() + HUNG_S, lambda: 0, lambda: None)
        await asyncio.to_thread(reception.run, address, Asker(TOKEN, "l", *driver.weights()), tokens_T)
        listener.close()
    assert reception.complete == 15 and peer.tokens_prefilled - before <= 1


async def test_layers_travel_while_later_ones_are_computed(moe_folder):
    told: list[Piece | int] = []
    peer = make_engine(moe_folder, dtype="bfloat16")
    seen_at_layer: list[int] = []
    forward = peer._weights.model.layers[2].forward

    def watch(*args, **kwargs):
        seen_at_layer.append(len(told))
        return forward(*args, **kwargs)

    peer._weights.model.layers[2].forward = watch
    rows = np.zeros((3, peer.blocks.block_bytes), np.uint8)
    peer.add(ask("p", prompt(3, 13), max_tokens=1), Export(0, rows, told.append))
    while peer.has_work:
        peer.step()
    assert seen_at_layer[0] == 2 and isinstance(told[0], Piece) and told[-1] == 3
