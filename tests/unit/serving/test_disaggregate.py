"""When another engine prefills: prices of both ways, and what the pool does with prefill engines."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineUnavailable
from slipstream.serving.members import FolderSource
from slipstream.serving.pool import EnginePool
from slipstream.serving.routing.disaggregate import OVERHEAD_S, Prefills, Side, worth_it
from slipstream.types import Completion, GenerateRequest, Sampling, Timings
from tests.unit.serving.test_pool import V1, Process
from tests.waiting import until


def test_an_idle_engine_keeps_its_prompt_and_one_that_decodes_gives_a_long_one_away():
    idle, decoding, there = Side(0, 1000), Side(0, 1000, others=8), Side(0, 1000)
    assert not worth_it(512, idle, there)
    assert worth_it(512, decoding, there)


def test_a_short_prompt_is_not_worth_the_round_trips():
    """8 requests stand still for 1 ms each; the handoff takes five."""
    assert not worth_it(1, Side(0, 1000, others=3), Side(0, 1000))
    assert OVERHEAD_S > 4 * 1 / 1000


def test_a_queue_there_is_weighed_against_those_who_would_wait_here():
    here = Side(0, 1000, others=2)
    assert worth_it(100, here, Side(190, 1000)) and not worth_it(100, here, Side(200, 1000))


def test_a_slow_prefill_engine_gets_less_and_an_unknown_rate_is_that_of_the_other_side():
    here = Side(0, 1000, others=3)
    assert worth_it(100, here, Side(0, 300)) and not worth_it(100, here, Side(0, 200))
    assert worth_it(100, Side(0, 0, others=3), Side(0, 300)) is worth_it(100, Side(0, 300, others=3), Side(0, 300))


def completion(came: int, queued_s: float) -> Completion:
    got = Completion("r", np.zeros(1, np.int32), np.zeros(1, np.float32), ((0, 1),), "stop", timings=Timings(queued_s=queued_s))
    object.__setattr__(got, "cached_by_tier", {"peer": came})
    return got


def test_prompts_go_to_the_prefill_engine_with_the_shortest_queue_and_rates_are_learned_from_answers():
    prefills, peers = Prefills("always"), {"a": "host:1", "b": "host:2"}
    first = prefills.choose(400, Side(0, 0), peers, 0.0)
    second = prefills.choose(100, Side(0, 0), peers, 0.0)
    third = prefills.choose(100, Side(0, 0), peers, 0.0)
    assert first and second and third
    assert [away.name for away in (first, second, third)] == ["a", "b", "b"]
    prefills.answered(first, completion(400, 0.5), 0.5)
    prefills.answered(third, completion(100, 9.0), 9.0)  # it waited for the second: says nothing about the rate
    assert prefills._load("a").rate == 800 and prefills._load("b").rate == 0
    assert prefills.counts == {"there": 3, "tokens": 600, "came": 500}


def test_no_whole_block_and_no_prefill_engine_mean_here():
    assert Prefills("always").choose(0, Side(0, 0), {"a": "host:1"}, 0.0) is None
    assert Prefills("always").choose(10, Side(0, 0), {}, 0.0) is None


# ---- the pool ----


class Recording(Process):
    def __init__(self, name: str, version: int):
        super().__init__(name, version)
        self.prefilled_at: list[str] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.prefilled_at.append(request.prefill_at)
        return await super().generate(request)


@pytest.fixture
async def split(tmp_path):
    """(pool, decode engine, prefill engine), with version 1 live on both."""
    processes = {}
    for i, (role, handoff) in enumerate((("decode", ""), ("prefill", "host:4711"))):
        url = f"http://host:{i}"
        processes[url] = Recording(f"engine-{i}", -1)
        endpoint = {"url": url, "token": "t", "pid": i, "role": role, "handoff": handoff}
        (tmp_path / f"engine-{i}.json").write_text(json.dumps(endpoint))
    config = RouterConfig(patience_s=1, prefill="always")
    async with EnginePool(FolderSource(tmp_path, 2), config, connect=lambda endpoint: processes[endpoint.url]) as pool:
        await pool.prepare(V1)
        await pool.commit(1)
        await until(lambda: all(replica.ready for replica in pool.fleet.replicas))
        yield pool, *processes.values()


def long(name: str) -> GenerateRequest:
    return GenerateRequest(name, np.arange(100, dtype=np.int32), Sampling())


async def test_a_prefill_engine_has_the_weights_and_gets_no_requests(split):
    pool, decode, prefill = split
    await asyncio.gather(*(pool.generate(long(f"r{i}/0")) for i in range(8)))
    assert prefill.live == 1 and not prefill.served and len(decode.served) == 8


async def test_a_prompt_names_its_prefill_engine_and_one_that_is_cached_does_not(split):
    pool, decode, _ = split
    await pool.generate(long("r/0"))
    await pool.generate(long("r/1"))
    assert decode.prefilled_at == ["host:4711", ""]
    assert pool.metrics()["router/prefills/there"] == 1 and pool.metrics()["router/prefills/tokens"] == 96


async def test_a_prefill_engine_that_is_down_is_not_named(split):
    pool, decode, prefill = split
    prefill.alive = False
    pool.fleet.failed(pool.fleet.named("engine-1"), EngineUnavailable("killed"))
    await pool.generate(long("r/0"))
    assert decode.prefilled_at == [""]


async def test_without_a_decode_engine_nobody_is_served_by_the_prefill_engine(split):
    pool, decode, prefill = split
    decode.alive = False
    with pytest.raises(EngineUnavailable):
        await pool.generate(long("r/0"))
    assert not prefill.served
