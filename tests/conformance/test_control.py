"""Abort, cancellation, overload, bad requests, pause and restart: each costs its own request and nobody else's."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slipstream.errors import EngineError, EngineUnavailable, RequestError
from slipstream.types import EngineState
from tests.conformance.conftest import Live
from tests.conformance.material import SEQ_LEN, A, B
from tests.conformance.subjects import CAPACITY, MAX_WAITING

LONG = {"max_tokens": 450, "temperature": 1.0}


async def still_works(live: Live) -> None:
    request, completion = await live.answer(live.request(9, seed=9, max_tokens=5))
    if "model" in live.subject.offers:
        live.check(A, request, completion)


async def test_an_aborted_request_ends_with_what_it_has_and_the_others_go_on(live: Live):
    requests = [live.request(50 + seed, seed=seed, **LONG) for seed in range(6)]
    tasks = [asyncio.create_task(live.answer(request)) for request in requests]
    await live.until(lambda state: state.running == 6)
    await live.engine.abort([requests[0].id, requests[1].id])
    done = [completion.finish_reason for _, completion in await asyncio.gather(*tasks)]
    assert "abort" in done[:2] and "abort" not in done[2:], "one of two may have ended before"


async def test_a_request_aborted_as_soon_as_it_was_sent_ends(live: Live):
    request = live.request(60, seed=1, **LONG)
    task = asyncio.create_task(live.answer(request))
    while not task.done():
        await live.engine.abort([request.id])
        await asyncio.sleep(0.01)
    await task
    await still_works(live)


async def test_aborting_what_nobody_knows_does_nothing(live: Live):
    await live.engine.abort(["nobody", ""])
    await live.engine.abort([])
    await still_works(live)


async def test_cancelling_a_call_frees_what_it_held(live: Live):
    tasks = [asyncio.create_task(live.engine.generate(live.request(70 + seed, seed=seed, **LONG))) for seed in range(6)]
    await live.until(lambda state: state.running == 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await live.until(lambda state: state.running == 0 and state.waiting == 0)
    await still_works(live)


@pytest.mark.needs("limits", "model")
async def test_more_than_it_can_hold_is_refused_at_once_and_the_rest_is_served(live: Live):
    requests = [live.request(200 + seed, seed=seed, max_tokens=40) for seed in range(2 * CAPACITY + 8)]
    done = await asyncio.gather(*(live.answer(request) for request in requests), return_exceptions=True)
    errors = [result for result in done if isinstance(result, BaseException)]
    assert errors and all(isinstance(error, EngineUnavailable) for error in errors)
    assert len(done) - len(errors) >= MAX_WAITING
    await still_works(live)


BAD = {
    "an empty prompt": (np.zeros(0, np.int32), {}),
    "a prompt without room for a reply": (np.full(SEQ_LEN, 20, np.int32), {}),
    "a token outside the vocabulary": (np.array([5, 100_000], np.int32), {}),
    "a negative token": (np.array([5, -1], np.int32), {}),
    "a negative temperature": (np.array([5, 6], np.int32), {"temperature": -1.0}),
    "top_p of 0": (np.array([5, 6], np.int32), {"top_p": 0.0}),
    "a negative top_k": (np.array([5, 6], np.int32), {"top_k": -2}),
    "min_p above 1": (np.array([5, 6], np.int32), {"min_p": 1.5}),
    "no tokens": (np.array([5, 6], np.int32), {"max_tokens": 0}),
    "an empty stop text": (np.array([5, 6], np.int32), {"stop": ("",)}),
    "a stop id outside the vocabulary": (np.array([5, 6], np.int32), {"stop_token_ids": (100_000,)}),
    "a negative salt": (np.array([5, 6], np.int32), {"salt": -1}),
}


@pytest.mark.needs("limits", "model")
@pytest.mark.parametrize("what", BAD)
async def test_a_bad_request_is_refused_as_one_and_costs_nobody_anything(live: Live, what: str):
    prompt_T, values = BAD[what]
    good = asyncio.create_task(live.answer(live.request(10, seed=1, max_tokens=30)))
    with pytest.raises(RequestError):
        await live.engine.generate(live.request(prompt_T, **values))
    live.check(A, *await good)


@pytest.mark.needs("limits", "model")
async def test_an_id_that_is_running_is_not_taken_twice(live: Live):
    request = live.request(11, seed=1, **LONG)
    first = asyncio.create_task(live.answer(request))
    await live.until(lambda state: state.running == 1)
    with pytest.raises(EngineError):
        await live.engine.generate(request)
    await first
    await live.answer(request)


@pytest.mark.needs("pause")
async def test_a_paused_engine_holds_its_requests_and_goes_on_where_it_was(live: Live):
    tasks = [asyncio.create_task(live.answer(live.request(80 + seed, seed=seed, **LONG))) for seed in range(4)]
    await live.until(lambda state: state.running == 4)
    await live.engine.pause()  # type: ignore[attr-defined]
    assert (await live.engine.state()).paused
    counted = -1

    def stands_still(state: EngineState) -> bool:
        nonlocal counted
        assert state.running == 4, "requests end although it is paused"
        before, counted = counted, state.generated_tokens
        return counted == before

    await live.until(stands_still, every_s=0.2)  # a step may have been under way
    await live.engine.resume()  # type: ignore[attr-defined]
    for request, completion in await asyncio.gather(*tasks):
        live.check(A, request, completion)


async def test_after_a_restart_it_takes_the_current_version_and_serves(fresh: Live):
    with pytest.raises(EngineError):
        await fresh.engine.generate(fresh.request(12))
    await fresh.swap(fresh.material.versions[B])
    request, completion = await fresh.answer(fresh.request(12, salt=B, seed=1, max_tokens=5))
    if "model" in fresh.subject.offers:
        fresh.check(B, request, completion)
