"""The token-in token-out route, the admin routes and the step loop behind them."""

from __future__ import annotations

import asyncio
import stat
from itertools import pairwise

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.driver import MAX_FAILED_STEPS, EngineDriver
from slipstream.engine.server import write_endpoint
from slipstream.errors import ConfigError, EngineBusy, EngineError, EngineUnavailable, RequestError, StateError
from slipstream.serving.client import HttpEngine
from slipstream.serving.members import read_endpoint
from slipstream.types import GenerateRequest, PolicyVersion, Sampling
from tests.unit.server.scripted import ScriptedEngine
from tests.waiting import HUNG_S, pass_deadlines, until


def ask(name="r/0", prompt=(1, 2, 3), **sampling) -> GenerateRequest:
    return GenerateRequest(name, np.array(prompt, np.int32), Sampling(**sampling))


def echo(request: GenerateRequest) -> list[int]:
    return request.prompt_T.tolist()


async def test_a_request_comes_back_as_the_engine_answered_it(serve):
    served = await serve(ScriptedEngine(echo))
    completion = await served.client.generate(ask(prompt=[5, 6, 7]))
    assert completion.tokens_N.tolist() == [5, 6, 7] and completion.tokens_N.dtype == np.int32
    assert completion.logprobs_N.tolist() == [-0.5] * 3
    assert (completion.id, completion.versions, completion.finish_reason) == ("r/0", ((0, 3),), "stop")


async def test_64_concurrent_requests_run_together_and_each_gets_its_own_answer(serve):
    served = await serve(ScriptedEngine(echo))
    prompts = [[i, 2 * i, i + 7] for i in range(64)]
    answers = await asyncio.gather(*(served.client.generate(ask(f"r{i}/0", p)) for i, p in enumerate(prompts)))
    assert [a.tokens_N.tolist() for a in answers] == prompts
    assert served.engine.steps < 64 * 3


async def test_a_zero_token_completion_is_an_answer_too(serve):
    served = await serve(ScriptedEngine(lambda _: []))
    completion = await served.client.generate(ask())
    assert len(completion.tokens_N) == 0 and completion.versions == ()


async def test_cancelling_the_call_aborts_the_request_and_its_id_can_be_used_again(serve):
    served = await serve(ScriptedEngine(echo))
    served.driver.pause()
    call = asyncio.create_task(served.client.generate(ask()))
    await until(lambda: "r/0" in served.engine.running)
    call.cancel()
    await until(lambda: served.engine.aborted == ["r/0"])
    served.driver.resume()
    assert (await served.client.generate(ask(prompt=[9]))).tokens_N.tolist() == [9]


async def test_an_answer_to_an_abandoned_request_never_reaches_a_new_one_with_its_id():
    engine = ScriptedEngine(echo)
    driver = EngineDriver(engine)
    old = asyncio.create_task(driver.generate(ask(prompt=[1])))
    await until(lambda: engine.running)
    old.cancel()
    await asyncio.wait([old])
    new = asyncio.create_task(driver.generate(ask(prompt=[2])))
    driving = asyncio.create_task(driver.drive())
    assert (await new).tokens_N.tolist() == [2]
    driving.cancel()


async def test_abort_ends_the_call_with_finish_reason_abort(serve):
    served = await serve(ScriptedEngine(echo))
    await served.client.pause()
    call = asyncio.create_task(served.client.generate(ask()))
    await until(lambda: served.engine.running)
    await served.client.abort(["r/0", "unknown"])
    assert (await call).finish_reason == "abort"


async def test_pause_holds_requests_and_resume_lets_them_go(serve):
    served = await serve(ScriptedEngine(echo))
    await served.client.pause()
    call = asyncio.create_task(served.client.generate(ask()))
    await until(lambda: served.engine.running)
    steps = served.engine.steps
    assert (await served.client.state()).paused
    assert served.engine.steps == steps and not call.done()
    await served.client.resume()
    assert (await call).finish_reason == "stop"


async def test_prepare_and_commit_swap_the_version_and_are_idempotent(serve):
    served = await serve(ScriptedEngine(echo))
    version = PolicyVersion(3, "abc", 2, "/weights/v3")
    for _ in range(2):
        await served.client.prepare(version)
    assert (await served.client.state()).prepared_version == 3
    for _ in range(2):
        await served.client.commit(3)
    state = await served.client.state()
    assert (state.live_version, state.fingerprint) == (3, "abc")
    assert (await served.client.generate(ask())).versions == ((3, 3),)


async def test_weights_with_another_fingerprint_are_an_engine_error_and_the_old_ones_stay(serve):
    served = await serve(ScriptedEngine(echo))
    with pytest.raises(EngineError, match="do not have the fingerprint") as caught:
        await served.client.prepare(PolicyVersion(3, "wrong", 2, "/weights/v3"))
    assert not isinstance(caught.value, (RequestError, EngineUnavailable))
    with pytest.raises(EngineError, match="not prepared"):
        await served.client.commit(3)
    assert (await served.client.state()).live_version == 0


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "the-token"}, {"Authorization": "Bearer té"}])
@pytest.mark.parametrize("route", ["prepare", "commit", "abort", "pause", "resume", "state"])
async def test_admin_routes_need_the_token(serve, header, route):
    served = await serve("x")
    method = served.http.get if route == "state" else served.http.post
    async with method(f"/admin/{route}", headers=header, data=b"{}") as response:
        assert response.status == 401
        assert "Authorization: Bearer" in (await response.json())["error"]["message"]
    assert not served.engine.paused


async def test_before_the_first_commit_requests_are_refused_as_unavailable_and_health_says_so(serve):
    served = await serve(ScriptedEngine(echo, version=-1))
    with pytest.raises(EngineUnavailable, match="no policy version is live") as caught:
        await served.client.generate(ask())
    assert not isinstance(caught.value, EngineBusy)
    async with served.http.get("/health") as response:
        assert response.status == 503
    await served.client.prepare(PolicyVersion(0, "abc", None, "/weights/v0"))
    await served.client.commit(0)
    async with served.http.get("/health") as response:
        body = await response.json()
    assert (response.status, body["status"], body["live_version"], body["fingerprint"]) == (200, "ok", 0, "abc")


async def test_a_full_queue_and_an_id_in_use_are_busy_and_an_impossible_request_is_a_request_error(serve):
    served = await serve(ScriptedEngine(echo, max_waiting=1))
    await served.client.pause()
    call = asyncio.create_task(served.client.generate(ask()))
    await until(lambda: served.engine.running)
    with pytest.raises(EngineBusy, match="waiting already"):
        await served.client.generate(ask("r/1"))
    with pytest.raises(EngineBusy, match="'r/0'"):
        await served.client.generate(ask("r/0"))
    await served.client.resume()
    await call
    with pytest.raises(RequestError, match="300 tokens leaves no room"):
        await served.client.generate(ask(prompt=range(300)))


async def test_a_step_that_fails_costs_those_who_took_part_and_the_engine_goes_on(serve):
    served = await serve(ScriptedEngine(echo))
    await served.client.pause()
    calls = [asyncio.create_task(served.client.generate(ask(f"r/{i}"))) for i in range(2)]
    await until(lambda: len(served.engine.running) == 2)
    served.engine.failures = [FloatingPointError("overflow in layer 3")]
    await served.client.resume()
    for call in calls:
        with pytest.raises(
            EngineUnavailable, match="HTTP 503: a step of the engine failed: FloatingPointError: overflow in layer 3"
        ) as caught:
            await call
        assert not isinstance(caught.value, EngineBusy)
    assert (await served.client.generate(ask(prompt=[9]))).tokens_N.tolist() == [9]
    async with served.http.get("/metrics") as response:
        assert "slipstream_engine_steps_failed_total 1.0" in await response.text()
    async with served.http.get("/health") as response:
        assert response.status == 200


async def test_a_stream_hears_of_the_failed_step_too(serve):
    served = await serve(ScriptedEngine(echo))
    served.engine.failures = [FloatingPointError("overflow")]
    body = {"prompt": [1, 2, 3], "stream": True}
    async with served.http.post("/v1/completions", json=body) as response:
        assert "a step of the engine failed: FloatingPointError: overflow" in await response.text()
    assert served.driver.ready


async def test_after_too_many_failed_steps_in_a_row_everybody_is_told_and_the_loop_ends(serve):
    served = await serve(ScriptedEngine(echo))
    served.engine.failures = [FloatingPointError("overflow")] * (MAX_FAILED_STEPS - 1)
    for _ in served.engine.failures.copy():
        with pytest.raises(EngineUnavailable, match="a step of the engine failed"):
            await served.client.generate(ask())
    await served.client.generate(ask())  # one that succeeds: it counts from 0 again
    served.engine.failures = [FloatingPointError("overflow")] * MAX_FAILED_STEPS
    for _ in range(MAX_FAILED_STEPS - 1):
        with pytest.raises(EngineUnavailable, match="a step of the engine failed"):
            await served.client.generate(ask())
    with pytest.raises(EngineUnavailable, match="going down: FloatingPointError: overflow"):
        await served.client.generate(ask())
    with pytest.raises(EngineUnavailable, match="going down"):
        await served.client.generate(ask())


async def test_an_engine_that_cannot_recover_ends_with_the_reason_of_that():
    engine = ScriptedEngine(echo)
    engine.failures = [FloatingPointError("overflow")]
    engine.recover = lambda: (_ for _ in ()).throw(StateError("KV blocks do not add up"))
    driver = EngineDriver(engine)
    driving = asyncio.create_task(driver.drive())
    with pytest.raises(EngineUnavailable, match="going down: StateError: KV blocks do not add up"):
        await driver.generate(ask())
    with pytest.raises(StateError):
        await driving


@pytest.mark.filterwarnings("ignore")
async def test_nobody_there_and_no_answer_in_time_are_unavailable(serve):
    async with HttpEngine("http://127.0.0.1:9", "x") as nobody:
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
            await nobody.state()
    served = await serve(ScriptedEngine(echo))
    await served.client.pause()
    async with HttpEngine(served.url, generate_timeout_s=HUNG_S) as client:
        asking = asyncio.create_task(client.generate(ask()))
        await until(lambda: served.engine.running)
        pass_deadlines()
        with pytest.raises(EngineUnavailable, match=rf"no answer within {HUNG_S:g} s"):
            await asking
    await until(lambda: served.engine.aborted)


async def test_a_taken_port_is_a_config_error_that_names_it(serve):
    served = await serve("x")
    port = int(served.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is taken"):
        await serve("y", port=port)


async def test_metrics_parse_as_prometheus_text(serve):
    served = await serve(ScriptedEngine(echo))
    async with served.http.get("/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    assert families["slipstream_engine_version_live"].samples[0].value == 0
    assert families["slipstream_engine_tokens_generated"].type == "counter"


async def test_busy_spans_cover_the_steps_and_do_not_overlap():
    driver = EngineDriver(ScriptedEngine(echo))
    driving = asyncio.create_task(driver.drive())
    spans = []
    for i in range(3):
        await driver.generate(ask(f"r/{i}"))
        spans += driver.take_spans()
    driving.cancel()
    assert spans and all(start <= end for start, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_an_endpoint_file_is_private_and_reads_back(tmp_path):
    file = tmp_path / "endpoints" / "engine-0.json"
    write_endpoint(file, "http://127.0.0.1:1", "secret")
    write_endpoint(file, "http://127.0.0.1:2", "secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == ["engine-0.json"]
    assert (read_endpoint(file).url, read_endpoint(file).token) == ("http://127.0.0.1:2", "secret")
