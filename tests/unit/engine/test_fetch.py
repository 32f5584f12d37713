"""Blocks from outside the device: the fetching state, what ends it, and that it never changes a token."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from slipstream.engine.local import local_engine
from tests.unit.engine.helpers import ask, make_engine, prompt, run
from tests.unit.engine.sources import held_by, with_source
from tests.unit.engine.test_failed_step import fail_once
from tests.unit.engine.test_weights import publish, swap
from tests.waiting import HUNG_S

PROMPT = prompt(1, 41)


@pytest.fixture(scope="module")
def computed(moe_folder):
    """(completion, blocks by key) of an engine that has computed PROMPT."""
    engine = make_engine(moe_folder)
    return run(engine, [ask("a", PROMPT, temperature=1.0, seed=5)])["a"], held_by(engine)


def same(one, other, gap: float = 0.0) -> bool:
    """Tokens, routing rows and logprobs; up to `gap` where another batch was computed, which rounds otherwise."""
    routing = np.array_equal(one.routing.ids_TLK, other.routing.ids_TLK) and one.routing.valid_T.all() and other.routing.valid_T.all()
    return one.tokens_N.tolist() == other.tokens_N.tolist() and bool(routing and np.abs(one.logprobs_N - other.logprobs_N).max() <= gap)


def start(engine, name="a", **sampling):
    engine.add(ask(name, PROMPT, **{"temperature": 1.0, "seed": 5, **sampling}))
    engine.step()
    engine.check_integrity()


def finish(engine):
    done = run(engine, [])
    assert engine.state().kv_used_frac == 0 and engine.state().waiting == 0
    return done


def test_fetched_blocks_give_the_same_tokens_logprobs_and_routing_rows(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1], at_once=True)
    done = run(engine, [ask("a", PROMPT, temperature=1.0, seed=5)])["a"]
    assert same(done, computed[0])
    assert (done.cached_tokens, done.cached_by_tier) == (40, {"peer": 40}) and engine.tokens_prefilled == 1
    again = run(engine, [ask("b", PROMPT, temperature=1.0, seed=5)])["b"]
    assert again.cached_by_tier == {"device": 40} and len(source.fetches) == 1


def test_while_a_fetch_is_under_way_there_is_no_work_and_others_go_ahead(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    start(engine)
    assert not engine.has_work and engine.state().waiting == 1 and engine.state().running == 0
    assert engine.state().kv_used_frac > 0, "blocks are reserved"
    other = run(engine, [ask("b", prompt(2, 9))])["b"]
    assert len(other.tokens_N) == 12 and not engine.has_work
    source.fetches[0].arrive()
    assert engine.has_work and same(finish(engine)["a"], computed[0])


def test_blocks_may_arrive_in_parts(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    start(engine)
    for _ in range(3):
        source.fetches[0].arrive(2)
        engine.step()
        assert not engine.has_work and engine.state().waiting == 1
    source.fetches[0].arrive()
    done = finish(engine)["a"]
    assert done.cached_by_tier == {"peer": 40} and same(done, computed[0])


@pytest.mark.parametrize("missing", [0, 3, 9])
def test_what_a_source_does_not_bring_is_computed(moe_folder, computed, missing):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    start(engine)
    source.fetches[0].payloads[missing] = None
    source.fetches[0].arrive()
    done = finish(engine)["a"]
    assert done.cached_tokens == missing * 4 and same(done, computed[0])
    assert source.asked == 1, "not asked again for what it failed to bring"


def test_a_fetch_that_raises_costs_nothing_but_time(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    start(engine)
    source.fetches[0].error = OSError("gone")
    source.fetches[0].arrive()
    assert same(finish(engine)["a"], computed[0])


@pytest.mark.parametrize("verb", ["find", "start"])
def test_a_source_that_raises_when_asked_is_passed_over(moe_folder, computed, monkeypatch, verb):
    engine = make_engine(moe_folder)
    source, second = with_source(engine, held=computed[1]), with_source(engine, held=computed[1], at_once=True)

    def fail(*args):
        raise OSError("gone")

    monkeypatch.setattr(source, verb, fail)
    start(engine)
    done = finish(engine)["a"]
    assert same(done, computed[0]) and len(second.fetches) == 1


def test_a_late_fetch_is_given_up_and_what_had_arrived_is_used(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1], timeout_s=0.2)
    start(engine)
    assert engine.idle_s is not None and engine.idle_s <= 0.2
    source.fetches[0].arrive(3)
    engine.step()
    assert engine.wait()
    done = finish(engine)["a"]
    assert done.cached_by_tier == {"peer": 12} and same(done, computed[0]) and source.fetches[0].cancelled
    assert engine._scheduler.fetches.ended == {"late": 1}


def test_sources_are_asked_in_order_and_each_brings_what_it_has(moe_folder, computed):
    engine = make_engine(moe_folder)
    keys = list(computed[1])
    near = with_source(engine, held={key: computed[1][key] for key in keys[:4]}, at_once=True)
    far = with_source(engine, held=computed[1], at_once=True)
    done = run(engine, [ask("a", PROMPT, temperature=1.0, seed=5)])["a"]
    assert same(done, computed[0]) and done.cached_tokens == 40
    assert [len(f.payloads) for f in (near.fetches[0], far.fetches[0])] == [4, 6]


def test_a_group_waits_for_one_fetch(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    for i in range(8):
        engine.add(ask(f"r{i}", PROMPT, temperature=1.0, seed=5))
    engine.step()
    assert len(source.fetches) == 1 and engine.state().waiting == 8 and not engine.has_work
    engine.abort(["r3"])
    source.fetches[0].arrive()
    done = finish(engine)
    assert done.pop("r3").finish_reason == "abort" and all(same(c, computed[0], 1e-6) for c in done.values())
    assert [done[f"r{i}"].cached_by_tier for i in (0, 1)] == [{"peer": 40}, {"device": 40}]


def test_aborting_a_fetching_request_frees_its_blocks_and_its_followers_fetch_for_themselves(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    for i in range(2):
        engine.add(ask(f"r{i}", PROMPT, temperature=1.0, seed=5))
    engine.step()
    engine.abort(["r0"])
    assert [c.id for c in engine.step().finished] == ["r0"] and source.fetches[0].cancelled
    assert len(source.fetches) == 2
    source.fetches[0].arrive()
    assert not engine.has_work
    source.fetches[1].arrive()
    assert same(finish(engine)["r1"], computed[0])


@pytest.mark.parametrize("arrives", [True, False])
def test_a_failed_step_sends_fetching_requests_back_to_the_queue(moe_folder, computed, monkeypatch, arrives):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    start(engine)
    engine.add(ask("b", prompt(2, 9)))
    if arrives:
        source.fetches[0].arrive()
    fail_once(monkeypatch, type(engine._runner), "run")
    with pytest.raises(FloatingPointError):
        engine.step()
    lost = engine.recover()
    assert lost == (["a", "b"] if arrives else ["b"]) and engine.state().kv_used_frac == 0
    source.at_once = True
    if not arrives:
        assert same(finish(engine)["a"], computed[0])


def test_a_paused_engine_leaves_fetches_alone(moe_folder, computed):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1])
    start(engine)
    engine.pause()
    source.fetches[0].arrive()
    assert not engine.has_work and engine.idle_s is None and engine.step().finished == []
    engine.resume()
    assert same(finish(engine)["a"], computed[0])


def test_running_sequences_take_the_blocks_of_a_fetch_when_they_need_them(moe_folder, computed):
    """Preemption order: a fetch has computed nothing yet, so it goes first."""
    engine = make_engine(moe_folder, block_tokens=4)
    engine._scheduler.pool._free = engine._scheduler.pool._free[-24:]
    engine._scheduler.pool.num_blocks = 24
    source = with_source(engine, held=computed[1])
    engine.add(ask("long", prompt(3, 40), max_tokens=50, temperature=1.0, seed=1))
    engine.step()
    engine.add(ask("a", PROMPT, temperature=1.0, seed=5))
    engine.step()
    assert len(source.fetches) == 1
    while engine.has_work and not source.fetches[0].cancelled:
        engine.step()
        engine.check_integrity()
    assert engine.preemptions == 0 and engine.state().running == 1
    source.at_once = True
    assert same(finish(engine)["a"], computed[0])


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_a_weight_update_while_fetching(moe_folder, other_folder, computed, tmp_path, mode):
    engine = make_engine(moe_folder, on_update=mode)
    source = with_source(engine, held=computed[1])
    start(engine)
    swap(engine, publish(other_folder, tmp_path / "v1", 1))
    engine.check_integrity()
    source.at_once = True
    if mode == "recompute":
        assert source.fetches[0].cancelled
    else:
        source.fetches[0].arrive()
    done = finish(engine)["a"]
    assert [version for version, _ in done.versions] == [1] and done.finish_reason != "abort"
    assert (done.cached_tokens, done.kv_age) == ((0, 0) if mode == "recompute" else (40, 1))


def test_without_a_prefix_cache_no_source_is_asked(moe_folder, computed):
    engine = make_engine(moe_folder, prefix_cache=False)
    source = with_source(engine, held=computed[1], at_once=True)
    assert run(engine, [ask("a", PROMPT)])["a"].cached_tokens == 0 and source.asked == 0


@pytest.mark.parametrize("arrives", [True, False], ids=["it arrives", "it is late"])
async def test_the_driver_wakes_when_a_fetch_ends(moe_folder, computed, arrives):
    engine = make_engine(moe_folder)
    source = with_source(engine, held=computed[1], timeout_s=HUNG_S if arrives else 0.1)

    def arrive() -> None:
        while not source.fetches:
            time.sleep(0.005)
        time.sleep(0.05)
        source.fetches[0].arrive()

    thread = threading.Thread(target=arrive)
    async with local_engine(engine) as driver:
        if arrives:
            thread.start()
        done = await asyncio.wait_for(driver.generate(ask("a", PROMPT, temperature=1.0, seed=5)), HUNG_S / 2)
    if arrives:
        thread.join()
    source.fetches[0].wake()  # after the loop has ended: must not raise
    assert same(done, computed[0]) and done.cached_tokens == (40 if arrives else 0)
