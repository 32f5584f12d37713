"""The replica's server over the scripted vLLM, asked as the pool asks it: over HTTP, with slipstream.serving.client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineError, EngineUnavailable, RequestError
from slipstream.serving import client as client_module
from slipstream.serving.client import HttpEngine
from slipstream.serving.members import UrlSource
from slipstream.serving.pool import EnginePool
from slipstream.serving.vllm import updates as updates_module
from slipstream.serving.vllm.app import make_app
from slipstream.serving.vllm.engine import VllmEngine
from slipstream.types import PolicyVersion, TokenPiece
from tests.unit.serving.vllm.stub import StubVllm, ask, stubbed
from tests.waiting import until


@pytest.fixture(autouse=True)
def _any_files(monkeypatch):
    monkeypatch.setattr(updates_module, "verify_fits", lambda version, shapes: None)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[StubVllm, VllmEngine, HttpEngine]]:
    """Version 1 is live."""

    async def metrics() -> str:
        return "vllm:x 1\n"

    async with stubbed(folder) as (stub, engine):
        runner = web.AppRunner(make_app(engine, "token", metrics), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with HttpEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", "token") as client:
            await swap(client, 1)
            yield stub, engine, client
        await runner.cleanup()


async def swap(engine: HttpEngine, number: int) -> None:
    await engine.prepare(PolicyVersion(number, f"f{number}", None, f"w{number}"))
    await engine.commit(number)


def heard_in(pieces: list[TokenPiece]) -> list[tuple[int, float, int]]:
    return [(int(token), float(logprob), p.version) for p in pieces for token, logprob in zip(p.tokens_N, p.logprobs_N, strict=True)]


async def test_tokens_are_heard_as_vllm_samples_them_and_the_completion_is_whole(tmp_path):
    async with served(tmp_path) as (stub, _, client):
        stub.go.clear()
        pieces: list[TokenPiece] = []
        asking = asyncio.create_task(client.stream(ask("a", max_tokens=4), pieces.append))
        await until(lambda: pieces)
        assert not asking.done(), "the first is heard before there is a second"
        stub.go.set()
        done = await asking
    assert heard_in(pieces) == [(3, -1.0, 1), (4, -1.0, 1), (5, -1.0, 1)], "the last comes with the completion"
    assert done.tokens_N.tolist() == [3, 4, 5, 6] and done.logprobs_N.tolist() == [-1.0] * 4
    assert (done.versions, done.finish_reason, done.cached_tokens) == (((1, 4),), "length", 2)


async def test_a_stream_goes_on_after_an_update_with_each_token_under_the_version_that_sampled_it(tmp_path):
    async with served(tmp_path) as (stub, _, client):
        stub.go.clear()
        pieces: list[TokenPiece] = []
        asking = asyncio.create_task(client.stream(ask("a", max_tokens=5), pieces.append))
        await until(lambda: pieces)
        stub.canary_go.clear()
        updating = asyncio.create_task(swap(client, 2))
        await until(lambda: stub.version == "2")
        stub.go.set()
        await asyncio.sleep(0.05)
        assert len(pieces) == 1, "nothing is heard before the verdict"
        stub.canary_go.set()
        await updating
        done = await asking
    assert heard_in(pieces) == [(3, -1.0, 1), (4, -2.0, 2), (5, -2.0, 2), (6, -2.0, 2)]
    assert done.tokens_N.tolist() == [3, 4, 5, 6, 7] and done.versions == ((1, 1), (2, 4))


async def test_a_server_that_cannot_say_where_the_weights_changed_costs_the_hearing_not_the_request(tmp_path):
    async with served(tmp_path) as (stub, _, client):
        stub.go.clear()
        stub.no_spans = True
        pieces: list[TokenPiece] = []
        asking = asyncio.create_task(client.stream(ask("a", max_tokens=4), pieces.append))
        await until(lambda: pieces)
        await swap(client, 2)
        stub.go.set()
        done = await asking
    assert heard_in(pieces) == [(3, -1.0, 1)]
    assert done.tokens_N.tolist() == [3, 4, 5, 6] and done.versions == ((1, 1), (2, 3))


async def test_a_stream_that_is_aborted_during_an_update_ends_without_waiting_for_the_verdict(tmp_path):
    async with served(tmp_path) as (stub, _, client):
        stub.go.clear()
        stub.canary_go.clear()
        pieces: list[TokenPiece] = []
        asking = asyncio.create_task(client.stream(ask("a", max_tokens=4), pieces.append))
        await until(lambda: pieces)
        updating = asyncio.create_task(swap(client, 2))
        await until(lambda: stub.version == "2")
        aborting = asyncio.create_task(client.abort(["a"]))
        stub.go.set()
        await aborting
        assert not updating.done() and len(pieces) == 1
        stub.canary_go.set()
        await updating
        assert (await asking).tokens_N.tolist() == [3, 4, 5, 6]


async def test_nothing_of_weights_that_turn_out_to_be_wrong_is_heard_and_another_replica_can_go_on(tmp_path):
    async with served(tmp_path) as (stub, _, client):
        stub.go.clear()
        stub.spoil.add("w2")
        stub.canary_go.clear()
        pieces: list[TokenPiece] = []
        asking = asyncio.create_task(client.stream(ask("a", max_tokens=4), pieces.append))
        await until(lambda: pieces)
        updating = asyncio.create_task(swap(client, 2))
        await until(lambda: stub.version == "2")
        stub.go.set()
        await asyncio.sleep(0.05)
        stub.canary_go.set()
        with pytest.raises(EngineError, match="version 2 is refused"):
            await updating
        with pytest.raises(EngineUnavailable, match="failed verification"):
            await asking
    assert heard_in(pieces) == [(3, -1.0, 1)]


async def test_a_stream_that_fails_is_a_typed_error_before_and_after_its_first_token(tmp_path):
    async with served(tmp_path) as (stub, _, client):
        with pytest.raises(RequestError, match="temperature"):
            await client.stream(ask("a", temperature=-1.0), lambda _: None)
        stub.fails_at = 0
        with pytest.raises(EngineUnavailable, match="out of memory"):
            await client.stream(ask("b", max_tokens=4), lambda _: None)
        stub.fails_at, pieces = 2, []
        with pytest.raises(EngineUnavailable, match="out of memory"):
            await client.stream(ask("c", max_tokens=4), pieces.append)
        assert len(pieces) == 2
        stub.fails_at, stub.level = -1, 9999.0
        with pytest.raises(EngineUnavailable, match="missing or not a number"):
            await client.stream(ask("d", max_tokens=4), pieces.append)
        assert len(pieces) == 2


async def test_the_pool_streams_from_it(tmp_path):
    async with served(tmp_path) as (_, _, client), EnginePool(UrlSource([client.url], "token"), RouterConfig()) as pool:
        pieces: list[TokenPiece] = []
        done = await pool.stream(ask("a", max_tokens=3), pieces.append)
        assert [token for token, _, _ in heard_in(pieces)] == [3, 4] and done.tokens_N.tolist() == [3, 4, 5]


async def test_who_stops_listening_ends_the_request(tmp_path):
    async with served(tmp_path) as (stub, engine, client):
        stub.go.clear()
        pieces: list[TokenPiece] = []
        asking = asyncio.create_task(client.stream(ask("a", max_tokens=4), pieces.append))
        await until(lambda: pieces)
        assert engine.kv_age_max == 1, "it is in flight"
        asking.cancel()
        await until(lambda: engine.kv_age_max == 0)


async def test_the_admin_routes_are_those_of_every_engine(tmp_path):
    async with served(tmp_path) as (stub, _, client):
        await client.drain()
        assert (await client.state()).draining
        await client.drain(False)
        assert not (await client.state()).draining
        await client.pause()
        assert (await client.state()).paused
        await client.resume()
        assert stub.calls[-2:] == ["pause mode=keep", "resume"] and not (await client.state()).paused
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{client.url}/admin/pause", headers={"Authorization": "Bearer wrong"}) as answer:
                assert answer.status == 401
            async with session.get(f"{client.url}/health") as answer:
                assert answer.status == 200 and (await answer.json())["live_version"] == 1
            async with session.get(f"{client.url}/metrics") as answer:
                assert await answer.text() == "vllm:x 1\n"


async def test_a_commit_has_the_time_of_a_load_and_one_that_takes_longer_goes_on_and_is_found_when_asked_again(tmp_path, monkeypatch):
    async with served(tmp_path) as (stub, _, client):
        monkeypatch.setattr(client_module, "ASK_TIMEOUT_S", 0.05)
        stub.canary_go.clear()
        committing = asyncio.create_task(swap(client, 2))
        await until(lambda: stub.version == "2")
        await asyncio.sleep(0.1)
        stub.canary_go.set()
        await committing
        monkeypatch.setattr(client_module, "ASK_TIMEOUT_S", 60.0)
        stub.canary_go.clear()
        await client.prepare(PolicyVersion(3, "f3", None, "w3"))
        async with HttpEngine(client.url, "token", update_timeout_s=0.05) as hasty:
            with pytest.raises(EngineUnavailable, match=r"commit: no answer within 0.05 s"):
                await hasty.commit(3)
        stub.canary_go.set()
        await swap(client, 3)
        assert (await client.state()).live_version == 3 and stub.calls.count("load w3") == 1


async def test_a_replica_that_hangs_in_an_update_is_named_and_takes_part_again_once_it_has_it(tmp_path):
    config = RouterConfig(update_timeout_s=0.2, patience_s=0.5)
    async with served(tmp_path) as (stub, _, client), EnginePool(UrlSource([client.url], "token"), config) as pool:
        stub.canary_go.clear()
        await pool.prepare(PolicyVersion(2, "f2", None, "w2"))
        name = client.url.removeprefix("http://")
        with pytest.raises(EngineUnavailable, match=rf"patience_s = 0.5 s; last error: {name}: .*commit: no answer within 0.2 s"):
            await pool.commit(2)
        stub.canary_go.set()
        assert (await pool.state()).live_version == 2 and stub.calls.count("load w2") == 1
