"""Policy versions: two phases, exact stamps, and that what is live is what was published."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import EngineError, EngineUnavailable
from slipstream.types import PolicyVersion, TokenPiece
from tests.conformance.conftest import Live, check_accounts
from tests.conformance.material import A_AGAIN, A, B, prompt

LONG = {"max_tokens": 400, "temperature": 1.0}


async def test_nothing_is_sampled_before_a_version_is_live(fresh: Live):
    assert (await fresh.engine.state()).live_version < 0
    with pytest.raises(EngineUnavailable):
        await fresh.engine.generate(fresh.request(1))
    await fresh.swap(fresh.material.versions[A])
    await fresh.ask(1, max_tokens=4)


async def test_the_engine_says_which_version_is_live_and_stamps_its_tokens(live: Live):
    for number in (A, B, A_AGAIN):
        version = live.material.versions[number]
        await live.swap(version)
        state = await live.engine.state()
        assert (state.live_version, state.fingerprint) == (number, version.fingerprint)
        assert [v for v, _ in (await live.ask(2, max_tokens=4)).versions] == [number]


@pytest.mark.needs("model")
@pytest.mark.parametrize("numbers", [(A, A_AGAIN), (A, B), (A, B, A_AGAIN), (B, A_AGAIN, B)])
async def test_after_any_sequence_of_updates_the_engine_samples_as_a_fresh_load_does(live: Live, numbers: tuple[int, ...]):
    for number in numbers:
        await live.swap(live.material.versions[number])
        requests = [live.request(prompt(20 + seed, 30), salt=number, seed=seed, max_tokens=8) for seed in range(4)]
        for request, completion in await live.together(requests):
            live.check(number, request, completion)


async def test_an_update_in_flight_keeps_running_requests_and_marks_where_the_weights_changed(live: Live):
    count = 16 if "model" in live.subject.offers else 64  # a model's replies are long; those of the fake are of a moment
    for old, new in ((A, B), (B, A)) * 2:  # on a busy machine all of them may be over when the new weights are there
        running = [asyncio.create_task(live.answer(live.request(40 + seed, seed=seed, **LONG))) for seed in range(count)]
        await live.until(lambda state: state.running > 0)
        await live.engine.prepare(live.material.versions[new])
        await live.engine.commit(new)
        done = await asyncio.gather(*running)
        numbers = [tuple(version for version, _ in completion.versions) for _, completion in done]
        assert set(numbers) <= {(old,), (old, new), (new,)}
        if "model" in live.subject.offers:
            for request, completion in done:
                if completion.versions[0][0] == old:
                    live.check(old, request, completion)
        if (old, new) in numbers:
            return
    raise AssertionError(f"no request was running at an update: {numbers}")


@pytest.mark.needs("model", "stream")
async def test_a_stream_goes_on_after_an_update_and_says_of_each_token_what_sampled_it(live: Live):
    for old, new in ((A, B), (B, A)) * 2:
        requests = [live.request(60 + seed, seed=seed, salt=old, **LONG) for seed in range(16)]
        heard = [list[TokenPiece]() for _ in requests]
        running = [
            asyncio.create_task(live.engine.stream(request, pieces.append))  # type: ignore[attr-defined]
            for request, pieces in zip(requests, heard, strict=True)
        ]
        await live.until(lambda state: state.running > 0)
        await live.swap(live.material.versions[new])
        for request, pieces, asking in zip(requests, heard, running, strict=True):
            completion = await asking
            check_accounts(live.material, live.subject, request, completion)
            stamps = [(int(token), piece.version) for piece in pieces for token in piece.tokens_N]
            sampled_by = [version for version, count in completion.versions for _ in range(count)]
            assert stamps == list(zip(completion.tokens_N.tolist(), sampled_by, strict=True))[: len(stamps)]
        if any({old, new} <= {piece.version for piece in pieces} for pieces in heard):
            return
    raise AssertionError("no stream was heard before and after an update")


async def test_prepare_and_commit_may_be_repeated(live: Live):
    version = live.material.versions[B]
    for _ in range(2):
        await live.engine.prepare(version)
    for _ in range(2):
        await live.engine.commit(B)
    await live.swap(version)
    assert (await live.engine.state()).live_version == B


async def test_a_version_that_was_never_prepared_is_not_committed(live: Live):
    with pytest.raises(EngineError):
        await live.engine.commit(77)
    assert (await live.engine.state()).live_version == A


async def test_an_update_that_never_commits_leaves_the_old_version_live(live: Live):
    await live.engine.prepare(live.material.versions[B])
    request, completion = await live.answer(live.request(3, seed=3, max_tokens=6))
    assert [version for version, _ in completion.versions] == [A]
    if "model" in live.subject.offers:
        live.check(A, request, completion)
    await live.swap(live.material.versions[A_AGAIN])
    assert (await live.engine.state()).live_version == A_AGAIN


async def refused(live: Live, version: PolicyVersion) -> None:
    """`prepare` says no, and version A goes on as before."""
    with pytest.raises(EngineError) as error:
        await live.engine.prepare(version)
    assert not isinstance(error.value, EngineUnavailable), "another try cannot help"
    state = await live.engine.state()
    assert (state.live_version, state.fingerprint) == (A, live.material.versions[A].fingerprint)
    live.check(A, *await live.answer(live.request(4, seed=4, max_tokens=6)))


@pytest.mark.needs("weights", "model")
async def test_weights_with_another_fingerprint_are_refused(live: Live):
    await refused(live, replace(live.material.versions[B], fingerprint="0" * 32))


@pytest.mark.needs("weights", "model")
async def test_damaged_weights_are_refused(live: Live, tmp_path: Path):
    version = live.material.versions[B]
    folder = Path(shutil.copytree(version.path, tmp_path / "damaged"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3] + b"\x55\x55\x55")
    await refused(live, replace(version, path=str(folder)))


@pytest.mark.needs("weights", "model")
async def test_weights_that_are_not_there_are_refused(live: Live, tmp_path: Path):
    await refused(live, replace(live.material.versions[B], path=str(tmp_path / "nowhere")))


@pytest.mark.needs("weights", "model")
async def test_weights_of_another_shape_are_refused(live: Live):
    await refused(live, live.material.other_shape)
