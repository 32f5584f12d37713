"""Tokens on their way: over HTTP, and over a replica that dies in the middle."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineBusy, EngineUnavailable, RequestError
from slipstream.serving.members import UrlSource
from slipstream.serving.pool import EnginePool
from slipstream.serving.resume import Resumable
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion, Routing, Sampling, TokenPiece
from tests.unit.server.conftest import folder, serve, tokenizer  # noqa: F401 (fixtures)
from tests.unit.server.scripted import ScriptedEngine
from tests.waiting import HUNG_S, until

REQUEST = GenerateRequest("r/0", np.array([1, 2, 3], np.int32), Sampling(max_tokens=8, seed=5), salt=4, routing_from=2)


def heard_in(pieces: list[TokenPiece]) -> list[int]:
    return [int(token) for piece in pieces for token in piece.tokens_N]


async def test_the_tokens_come_one_by_one_and_the_completion_is_the_one_that_generate_gives(serve):  # noqa: F811
    served = await serve(ScriptedEngine(lambda _: [5, 6, 7, 8]))
    pieces: list[TokenPiece] = []
    streamed = await served.client.stream(REQUEST, pieces.append)
    whole = await served.client.generate(REQUEST)
    assert heard_in(pieces) == [5, 6, 7], "the last tokens come with the completion"
    assert all(piece.version == 0 and piece.logprobs_N.tolist() == [-0.5] for piece in pieces)
    assert streamed.tokens_N.tolist() == whole.tokens_N.tolist() == [5, 6, 7, 8]
    assert (streamed.finish_reason, streamed.versions) == (whole.finish_reason, whole.versions)


async def test_pieces_are_stamped_with_the_version_that_sampled_them(serve):  # noqa: F811
    served = await serve(ScriptedEngine(lambda _: [5] * 200, seq_len=512))
    pieces: list[TokenPiece] = []
    asking = asyncio.create_task(served.client.stream(GenerateRequest("r/0", REQUEST.prompt_T, Sampling(max_tokens=200)), pieces.append))
    await until(lambda: pieces)
    await served.client.prepare(PolicyVersion(3, "abc", None, ""))
    await served.client.commit(3)
    await asking
    versions = [piece.version for piece in pieces]
    assert versions[0] == 0 and versions == sorted(versions)


async def test_an_error_before_the_first_token_has_its_status_and_a_later_one_is_a_frame(serve):  # noqa: F811
    served = await serve(ScriptedEngine(lambda _: [5] * 100, seq_len=512, max_waiting=1))
    with pytest.raises(RequestError, match="leaves no room"):
        await served.client.stream(GenerateRequest("r/0", np.zeros(600, np.int32), Sampling()), lambda _: None)
    await served.client.pause()
    first = asyncio.create_task(served.client.stream(GenerateRequest("r/0", REQUEST.prompt_T, Sampling(max_tokens=100)), lambda _: None))
    await until(lambda: served.engine.running)
    with pytest.raises(EngineBusy):
        await served.client.stream(GenerateRequest("r/1", REQUEST.prompt_T, Sampling()), lambda _: None)
    first.cancel()
    await served.client.resume()
    pieces: list[TokenPiece] = []

    def hear(piece: TokenPiece) -> None:
        pieces.append(piece)
        served.engine.failures = [FloatingPointError("overflow")]

    await until(lambda: not served.engine.running)
    with pytest.raises(EngineUnavailable, match="overflow"):
        await served.client.stream(GenerateRequest("r/2", REQUEST.prompt_T, Sampling(max_tokens=100)), hear)
    assert pieces


async def test_cancelling_a_stream_aborts_the_request(serve):  # noqa: F811
    served = await serve(ScriptedEngine(lambda _: [5] * 400, seq_len=512))
    heard = asyncio.Event()
    request = GenerateRequest("r/0", REQUEST.prompt_T, Sampling(max_tokens=400))
    asking = asyncio.create_task(served.client.stream(request, lambda _: heard.set()))
    await heard.wait()
    asking.cancel()
    await until(lambda: served.engine.aborted == ["r/0"])


class Speaking:
    """A replica whose token at position p is p, as with a seed; it dies after `lives` tokens."""

    def __init__(self, version: int, lives: int = 10**6):
        self.version, self.lives = version, lives
        self.asked: list[GenerateRequest] = []

    async def stream(self, request: GenerateRequest, hear) -> Completion:
        self.asked.append(request)
        start, count = len(request.prompt_T), request.sampling.max_tokens
        tokens_N = np.arange(start, start + count, dtype=np.int32)
        for token in tokens_N[:-1]:
            if self.lives == 0:
                raise EngineUnavailable("connection reset")
            self.lives -= 1
            hear(TokenPiece(np.array([token], np.int32), np.array([-float(token)], np.float32), self.version))
            await asyncio.sleep(0)
        rows = np.arange(request.routing_from, start + count - 1)
        routing = Routing(request.routing_from, np.zeros((len(rows), 1, 1), np.uint8), np.ones(len(rows), np.bool_))
        return Completion(
            request.id, tokens_N, -tokens_N.astype(np.float32), ((self.version, count),), "length", routing, cached_tokens=start
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.stream(request, lambda _: None)

    async def state(self) -> EngineState:
        if self.lives == 0:
            raise EngineUnavailable("connection refused")
        return EngineState(self.version, "f")

    async def prepare(self, version):
        raise NotImplementedError

    commit = abort = prepare

    async def close(self) -> None:
        pass


def pool_over(*replicas: Speaking, patience_s: float = HUNG_S) -> EnginePool:
    source = UrlSource([f"http://{i}" for i in range(len(replicas))], "t")
    config = RouterConfig(policy="round_robin", patience_s=patience_s)
    return EnginePool(source, config, connect=lambda endpoint: replicas[int(endpoint.url[-1])])


@pytest.mark.parametrize("lives", [0, 1, 4])
async def test_a_replica_that_dies_in_the_middle_costs_the_caller_nothing(lives):
    first, second = Speaking(1, 10**6), Speaking(2)
    async with pool_over(first, second) as pool:
        await pool.state()
        first.lives = lives
        pieces: list[TokenPiece] = []
        done = await pool.stream(REQUEST, pieces.append)
    assert done.tokens_N.tolist() == list(range(3, 11)), "as if nothing had happened: the seed belongs to positions"
    assert done.logprobs_N.tolist() == [-float(t) for t in range(3, 11)]
    assert heard_in(pieces) == list(range(3, 10))
    assert done.versions == (((1, lives), (2, 8 - lives)) if lives else ((2, 8),))
    assert done.routing is not None and done.routing.start == 2 and len(done.routing.valid_T) == 3 + 8 - 1 - 2
    assert done.cached_tokens == 3 and done.finish_reason == "length"
    [request] = second.asked
    assert request.prompt_T.tolist() == list(range(1, 4)) + list(range(3, 3 + lives))
    assert (request.sampling.max_tokens, request.sampling.seed, request.salt, request.id) == (8 - lives, 5, 4, "r/0")


async def test_a_request_that_no_replica_survives_is_a_typed_error():
    replicas = [Speaking(1, 10**6) for _ in range(2)]
    async with pool_over(*replicas, patience_s=0.2) as pool:
        await pool.state()
        for replica in replicas:
            replica.lives = 2
        with pytest.raises(EngineUnavailable):
            await pool.stream(REQUEST, lambda _: None)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), max_size=5), st.integers(0, 4))
def test_however_often_a_completion_moves_its_parts_add_up(tries, last):
    request = GenerateRequest("r/0", np.array([9], np.int32), Sampling(max_tokens=100))
    heard: list[TokenPiece] = []
    begun, sampled = Resumable(request, heard.append), []
    for count, version in tries:
        sampled += [(10 + len(sampled) + i, version) for i in range(count)]
        begun.hear(TokenPiece(np.array([t for t, _ in sampled[-count:]], np.int32), np.zeros(count, np.float32), version))
    assert begun.request.prompt_T.tolist() == [9, *(token for token, _ in sampled)]
    assert begun.request.sampling.max_tokens == 100 - len(sampled)
    end = Completion("r/0", np.full(last, 7, np.int32), np.zeros(last, np.float32), ((2, last),), "stop")
    whole = begun.whole(end, begun.num_pieces)
    assert whole.tokens_N.tolist() == [token for token, _ in sampled] + [7] * last
    assert len(whole.logprobs_N) == len(whole.tokens_N)
    flat = [version for version, count in whole.versions for _ in range(count)]
    assert flat == [version for _, version in sampled] + [2] * last
    assert all(a != b for (a, _), (b, _) in zip(whole.versions, whole.versions[1:], strict=False))
