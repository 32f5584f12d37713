"""Parts of the engine that were made apart, together: whatever is on, tokens, logprobs and routing rows are those of the plain engine."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.config.disaggregation import DisaggregationConfig
from slipstream.config.tiers import TiersConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.types import Completion, GenerateRequest
from tests.unit.engine.helpers import ask, make_engine
from tests.unit.engine.test_disaggregation import pair
from tests.unit.engine.test_speculation import EAGER, repeating
from tests.unit.engine.test_weights import publish, swap
from tests.waiting import HUNG_S

FORMS = [("float32", "auto"), ("float32", "float8"), ("bfloat16", "auto"), ("bfloat16", "float8"), ("float8", "float8")]
UPDATES = [{"on_update": "keep"}, {"on_update": "recompute"}, {"on_update": "abort"}, {"max_kv_age": 0}, {"max_kv_age": 1}]
SMALL = 40
"""Blocks of the device: two requests and a bit."""


def shrink(engine: EmbeddedEngine, blocks: int = SMALL) -> EmbeddedEngine:
    pool = engine._scheduler.pool
    pool._free, pool.num_blocks = [block for block in pool._free if block < blocks], blocks
    return engine


def requests(turns: int = 2) -> list[GenerateRequest]:
    """Prompts of some phrases that repeat themselves, several times, sampled and greedy."""
    return [
        ask(f"r{i}/{turn}", repeating(i, 45 + i), seed=10 * turn + i, temperature=0.4 * (i % 3), max_tokens=24)
        for turn in range(turns)
        for i in range(5)
    ]


def play(engine: EmbeddedEngine, asked: list[GenerateRequest], together: int = 1, versions=()) -> dict[str, Completion]:
    """Some at a time; each of `versions` goes live in the middle of one of the first requests."""
    done, versions, waiting, steps = {}, list(versions), list(asked), 0
    while waiting or engine.has_work or engine.idle_s is not None:
        while waiting and len(engine._by_id) < together:
            engine.add(waiting.pop(0))
        if not engine.wait():
            continue
        done |= {completion.id: completion for completion in engine.step().finished}
        engine.check_integrity()
        steps += 1
        if versions and engine.tokens_generated >= 60 * (1 + engine._weights.number):
            swap(engine, versions.pop(0))
        assert steps < 5000
    return done


def check(done: dict[str, Completion], expected: dict[str, Completion], gap: float = 2e-5, same_versions: bool = True) -> None:
    assert done.keys() == expected.keys()
    for name, a in done.items():
        b = expected[name]
        assert a.finish_reason == b.finish_reason and (a.versions == b.versions or not same_versions)
        assert a.routing is not None and b.routing is not None
        assert a.routing.valid_T.all() and len(a.routing.valid_T) == len(b.routing.valid_T)
        np.testing.assert_array_equal(a.tokens_N, b.tokens_N)
        np.testing.assert_array_equal(a.routing.ids_TLK, b.routing.ids_TLK)
        np.testing.assert_allclose(a.logprobs_N, b.logprobs_N, rtol=0, atol=gap)


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMS[:-1])
def test_guesses_tiers_and_a_cache_in_fp8_together(moe_folder: Path, tmp_path: Path, dtype: str, kv_dtype: str):
    form = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_memory_mib": 2, "max_running": 4}
    expected = play(make_engine(moe_folder, **form), requests())
    tiers = TiersConfig(ram_mib=1, disk_path=tmp_path, disk_mib=4, min_tokens=4)
    with closing(shrink(make_engine(moe_folder, **form, **EAGER, tiers=tiers))) as engine:
        done = play(engine, requests())
        assert engine.speculation.accepted > 0 and any(set(c.cached_by_tier) - {"device"} for c in done.values())
    check(done, expected)


@pytest.fixture(scope="module")
def published(moe_folder: Path, other_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("published")
    return [publish(other_folder, folder / "1", 1), publish(moe_folder, folder / "2", 2)]


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_tiers_keep_what_an_update_keeps_and_no_more(moe_folder: Path, published, update: dict):
    form = {"kv_memory_mib": 2, "max_running": 4, **update, **EAGER}
    expected = play(make_engine(moe_folder, **form), requests(3), versions=published)
    with closing(shrink(make_engine(moe_folder, **form, tiers=TiersConfig(ram_mib=4, min_tokens=4)))) as engine:
        done = play(engine, requests(3), versions=published)
        assert engine.state().live_version == 2 and engine.block_values()["engine/tiers/ram/hit_tokens"] > 0
    check(done, expected)
    bound = 0 if update.get("on_update") == "recompute" else update.get("max_kv_age")
    assert bound is None or all(completion.kv_age <= bound for completion in done.values())


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_several_at_a_time_with_guesses_tiers_and_updates_end_whole(moe_folder: Path, published, update: dict):
    """Which step an update falls on differs, so only what must always hold is checked."""
    form = {"kv_memory_mib": 2, "max_running": 4, **update, **EAGER}
    with closing(shrink(make_engine(moe_folder, **form, tiers=TiersConfig(ram_mib=1, min_tokens=4)))) as engine:
        done = play(engine, requests(4), together=6, versions=published)
        again = play(engine, [replace(r, id=f"{r.id}/again", salt=2) for r in requests()])
        assert engine.state().live_version == 2 and engine.state().kv_used_frac == 0
    bound = 0 if update.get("on_update") == "recompute" else update.get("max_kv_age")
    for completion in done.values():
        assert completion.routing is not None
        assert completion.routing.valid_T.all() or completion.finish_reason == "abort"
        assert bound is None or completion.kv_age <= bound
        assert sum(count for _, count in completion.versions) == len(completion.tokens_N)
    fresh = play(make_engine(moe_folder, kv_memory_mib=2), requests())
    check({name.removesuffix("/again"): c for name, c in again.items()}, fresh, same_versions=False)


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMS)
async def test_a_prefill_engine_with_guesses_tiers_and_a_cache_in_fp8(moe_folder: Path, dtype: str, kv_dtype: str):
    form = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_memory_mib": 2, "max_running": 4, "max_step_tokens": 32}
    whole = play(make_engine(moe_folder, **form), requests())
    more = {**EAGER, "tiers": TiersConfig(ram_mib=1, min_tokens=4)}
    engines = [shrink(make_engine(moe_folder, **form, **more)) for _ in range(2)]
    done: dict[str, Completion] = {}
    with closing(engines[0]), closing(engines[1]):
        async with pair(*engines, DisaggregationConfig(timeout_s=HUNG_S)) as both:
            for request in requests():
                done[request.id] = await both.generate(request)
            tiers = {tier for completion in done.values() for tier in completion.cached_by_tier}
            assert both.driver.handoffs["blocks"] > 50 and both.driver.handoffs["failures"] == 0
    assert tiers >= {"peer", "ram"}
    # A token that is computed alone, as the last one after a handoff, takes another product than several where the cache is in FP8: in a
    # plain engine it differs by 3e-4 too. Where the tiers had the full blocks it is not alone.
    apart = {**form, "max_running": 1}
    alone = {r.id: play(make_engine(moe_folder, **apart | {"max_step_tokens": len(r.prompt_T) - 1}), [r])[r.id] for r in requests()}
    check(
        done,
        {
            name: min(whole[name], alone[name], key=lambda other, a=a: abs(other.logprobs_N[0] - a.logprobs_N[0]))
            for name, a in done.items()
        },
    )


@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("first", [0, 1])
async def test_an_update_between_prefill_and_decode(moe_folder: Path, published, update: dict, first: int):
    """One of the two has the new version a while before the other."""
    form = {"kv_memory_mib": 2, "max_running": 8, "max_step_tokens": 32, **update, **EAGER}
    engines = [shrink(make_engine(moe_folder, **form, tiers=TiersConfig(ram_mib=1, min_tokens=4)), 80) for _ in range(2)]
    bound = 0 if update.get("on_update") == "recompute" else update.get("max_kv_age")
    with closing(engines[0]), closing(engines[1]):
        async with pair(*engines, DisaggregationConfig(timeout_s=HUNG_S)) as both:
            done = []
            for version in published:
                under_way = [asyncio.create_task(both.generate(replace(r, id=f"{r.id}/{version.number}"))) for r in requests()]
                await asyncio.sleep(0.05)
                for engine in (engines[first], engines[1 - first]):
                    swap(engine, version)
                    both.driver._work.set()
                    await asyncio.sleep(0.05)
                done += await asyncio.gather(*under_way)
            again = [await both.generate(replace(r, id=f"{r.id}/again", salt=2)) for r in requests()]
    for completion in done:
        assert completion.routing is not None
        assert completion.routing.valid_T.all() or completion.finish_reason == "abort"
        assert bound is None or completion.kv_age <= bound
    fresh = play(make_engine(moe_folder, kv_memory_mib=2), requests())
    check({c.id.removesuffix("/again"): c for c in again}, fresh, same_versions=False)
