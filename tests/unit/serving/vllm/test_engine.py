"""The adapter against a scripted server: what is verified, what is held back, and what happens when the canary does not sing."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.errors import EngineBusy, EngineError, EngineUnavailable, RequestError
from slipstream.serving.vllm import api as api_module
from slipstream.serving.vllm import updates as updates_module
from slipstream.serving.vllm.api import Api
from slipstream.serving.vllm.updates import UpdateRefused
from slipstream.types import PolicyVersion
from tests.unit.serving.vllm.stub import ask, stubbed
from tests.waiting import until


@pytest.fixture(autouse=True)
def _any_files(monkeypatch):
    """What files hold is tested elsewhere: the versions of these tests have none."""
    monkeypatch.setattr(updates_module, "verify_fits", lambda version, shapes: None)


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number, f"f{number}", None, f"w{number}")


async def swap(engine, number: int) -> None:
    await engine.prepare(version(number))
    await engine.commit(number)


async def test_a_version_is_live_once_the_canary_agrees(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        with pytest.raises(EngineUnavailable, match="no policy version"):
            await engine.generate(ask("a"))
        await swap(engine, 1)
        assert stub.calls == ["pause mode=keep", "start_weight_update", "load w1", "resume"]
        state = await engine.state()
        assert (state.live_version, state.fingerprint, state.generated_tokens, state.kv_used_frac) == (1, "f1", 7, 0.25)
        done = await engine.generate(ask("a"))
        assert done.versions == ((1, 2),) and done.logprobs_N.tolist() == [-1.0, -1.0] and done.finish_reason == "length"


async def test_weights_that_compute_something_else_are_undone_and_the_old_version_stays(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.spoil.add("w2")
        with pytest.raises(UpdateRefused, match=r"version 2 is refused, live is 1.*difference 7 nats"):
            await swap(engine, 2)
        assert (await engine.state()).live_version == 1 and engine.updates.refused == 1 and not engine.updates.broken.is_set()
        assert [call for call in stub.calls if call.startswith("load")] == ["load w1", "load w2", "load w1"]
        assert (await engine.generate(ask("a"))).versions == ((1, 2),)
        stub.spoil.clear()
        await swap(engine, 2)
        assert (await engine.state()).live_version == 2


async def test_weights_that_cannot_be_loaded_are_undone_too(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.fail.add("w2")
        with pytest.raises(UpdateRefused, match="no such tensor"):
            await swap(engine, 2)
        assert (await engine.state()).live_version == 1 and stub.level == 1.0


async def test_an_engine_that_loads_neither_version_is_broken(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.spoil |= {"w1", "w2"}
        with pytest.raises(EngineUnavailable, match="and 1 fails"):
            await swap(engine, 2)
        assert engine.updates.broken.is_set() and not engine.ready


async def test_a_first_version_that_fails_leaves_nothing_live(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        stub.spoil.add("w1")
        with pytest.raises(UpdateRefused, match="live is none"):
            await swap(engine, 1)
        assert (await engine.state()).live_version == -1 and not engine.ready


@pytest.mark.parametrize("canary", [True, False])
async def test_what_is_slow_once_is_computed_before_anything_waits_for_it(tmp_path, canary):
    async with stubbed(tmp_path, canary=canary) as (stub, engine):
        await engine.updates.warm_up()
        assert stub.scored == 1 and (await engine.state()).live_version == -1


async def test_without_a_canary_nothing_tells(tmp_path):
    async with stubbed(tmp_path, canary=False) as (stub, engine):
        stub.spoil.add("w1")
        await swap(engine, 1)
        assert (await engine.state()).live_version == 1


async def test_answers_between_load_and_verdict_wait_for_it_and_new_requests_are_sent_after(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.go.clear()
        early = asyncio.create_task(engine.generate(ask("early")))
        await until(lambda: len(stub.bodies) == 1)
        await engine.prepare(version(2))
        stub.canary_go.clear()
        commit = asyncio.create_task(engine.commit(2))
        await until(lambda: stub.version == "2")
        late = asyncio.create_task(engine.generate(ask("late")))
        stub.go.set()
        await asyncio.sleep(0.05)
        assert not early.done() and len(stub.bodies) == 1
        stub.canary_go.set()
        await commit
        assert (await early).versions == ((2, 2),) and (await late).versions == ((2, 2),)


async def test_what_ran_under_refused_weights_is_not_delivered(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.spoil.add("w2")
        stub.go.clear()
        running = asyncio.create_task(engine.generate(ask("running")))
        await until(lambda: len(stub.bodies) == 1)
        with pytest.raises(UpdateRefused):
            await swap(engine, 2)
        with pytest.raises(EngineUnavailable, match="failed verification"):
            await running
        assert "reset_prefix_cache reset_running_requests=false" in stub.calls, "KV of wrong weights is forgotten"


async def test_what_runs_when_a_load_is_lost_is_not_delivered(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.drop.add("w2")
        stub.go.clear()
        running = asyncio.create_task(engine.generate(ask("running")))
        await until(lambda: len(stub.bodies) == 1)
        with pytest.raises(EngineUnavailable):
            await swap(engine, 2)
        assert engine.updates.broken.is_set()
        stub.go.set()
        with pytest.raises(EngineUnavailable, match="send it again"):
            await running


async def test_a_caller_that_goes_away_does_not_stop_a_commit_half_way(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await engine.prepare(version(1))
        stub.canary_go.clear()
        commit = asyncio.create_task(engine.commit(1))
        await until(lambda: stub.level == 1.0)
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)
        stub.canary_go.set()
        await engine.commit(1)
        assert (await engine.state()).live_version == 1 and stub.calls.count("load w1") == 1


async def test_commit_needs_prepare_and_a_running_engine(tmp_path):
    async with stubbed(tmp_path) as (_, engine):
        with pytest.raises(EngineError, match="prepared is None, live is None"):
            await engine.commit(5)
        await swap(engine, 1)
        await engine.prepare(version(2))
        await engine.pause()
        with pytest.raises(EngineUnavailable, match="resume first"):
            await engine.commit(2)
        await engine.resume()
        await engine.commit(2)


@pytest.mark.parametrize(
    ("on_update", "calls"), [("abort", "pause mode=abort"), ("recompute", "reset_prefix_cache reset_running_requests=true")]
)
async def test_an_update_may_abort_or_recompute_what_runs(tmp_path, on_update, calls):
    async with stubbed(tmp_path, on_update) as (stub, engine):
        await swap(engine, 1)
        assert calls in stub.calls


async def test_abort_ends_what_runs_and_returns_when_it_has_ended(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.go.clear()
        running = asyncio.create_task(engine.generate(ask("x/1")))
        await asyncio.sleep(0)
        await engine.abort(["x/1", "nobody"])
        assert (await running).finish_reason == "abort"


async def test_an_engine_takes_so_many_requests_and_each_id_once(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.go.clear()
        running = [asyncio.create_task(engine.generate(ask(f"r{i}"))) for i in range(4)]
        await until(lambda: len(stub.bodies) == 4)
        with pytest.raises(EngineBusy, match="4 requests are in flight"):
            await engine.generate(ask("r4"))
        assert (await engine.state()).running == 4
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        with pytest.raises(EngineBusy, match="still running"):
            await engine.generate(ask("r1"))
        stub.go.set()
        await asyncio.gather(*running[1:])
        assert engine.flights.busy_s > 0 and len(engine.flights.spans) == 1


async def test_what_vllm_is_asked_for_is_what_was_asked(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        await engine.generate(ask("a", max_tokens=99, top_p=0.5, top_k=3, min_p=0.1, temperature=0.7, seed=4, stop_token_ids=(9,)))
        sampling = stub.bodies[0]["sampling_params"]
        assert stub.bodies[0]["cache_salt"] == "v0" and stub.bodies[0]["token_ids"] == [5, 6, 7]
        wanted = {"max_tokens": 29, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "temperature": 0.7, "seed": 4, "stop_token_ids": [0, 9]}
        assert {key: sampling[key] for key in wanted} == wanted and sampling["logprobs"] == 0


async def test_a_server_that_is_gone_is_unavailable(tmp_path):
    api = Api(tmp_path / "nobody")
    with pytest.raises(EngineUnavailable, match="vLLM: /inference/v1/generate"):
        await api.generate({})
    assert not await api.healthy() and await api.gone()
    await api.close()


async def test_a_server_whose_engine_is_dead_is_gone_and_one_that_is_slow_is_not(tmp_path, monkeypatch):
    async with stubbed(tmp_path) as (stub, _):
        api = Api(tmp_path / "s")
        assert not await api.gone()
        stub.health = 503
        assert await api.gone()
        monkeypatch.setattr(api_module, "HEALTH_TIMEOUT_S", 0.05)
        stub.health_go.clear()
        assert not await api.gone() and not await api.healthy()
        await api.close()


@pytest.mark.parametrize("logprob", [float("nan"), -9999.0])
async def test_a_token_without_a_logprob_is_never_delivered(tmp_path, logprob):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        stub.level = -logprob
        with pytest.raises(EngineUnavailable, match=r"missing or not a number|JSON"):
            await engine.generate(ask("a"))


async def test_a_bad_request_is_refused_before_it_is_sent(tmp_path):
    async with stubbed(tmp_path) as (stub, engine):
        await swap(engine, 1)
        with pytest.raises(RequestError, match="temperature"):
            await engine.generate(ask("a", temperature=-1.0))
        with pytest.raises(RequestError, match="seed"):
            await engine.generate(ask("a", seed=1 << 70))
        assert not stub.bodies


def test_the_age_of_kv_is_bounded_by_the_start_of_the_rollout():
    from slipstream.serving.vllm.calls import _age

    assert _age(3, 0, ((5, 2), (6, 1))) == 1 and _age(3, 16, ((5, 2),)) == 2 and _age(3, 0, ((5, 2),)) == 0 and _age(9, 16, ((5, 2),)) == 0
    assert _age(0, 0, ()) == 0
