"""A commit waits until all ranks were asked, a ring wakes the loop: the driver over one rank, with the other one played by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from slipstream.config.serve import EngineConfig
from slipstream.config.wide import WideConfig
from slipstream.engine.wide.driver import WideDriver
from slipstream.engine.wide.engine import WideEngine
from slipstream.errors import EngineError, EngineUnavailable
from slipstream.transport.weights import fingerprint_file
from slipstream.types import PolicyVersion
from tests.unit.engine.helpers import SEQ_LEN, ask, make_engine, prompt, run
from tests.waiting import HUNG_S, pass_deadlines, until


class OneOfOne:
    """A group in which this rank is alone, and `others(values)` says what the rest would vote."""

    rank, size, timeout_s, broken = 0, 1, HUNG_S, None

    def __init__(self) -> None:
        self.others: Callable[[list[int]], list[int]] = lambda values: values
        self.votes = 0

    def exchange(self, value):
        return [value]

    def largest(self, values):
        self.votes += 1
        return [max(pair) for pair in zip(values, self.others(list(values)), strict=True)]

    def add_up(self, values):
        return values

    def swap(self, x, sent_R, received_R):
        return x

    def swap_counts(self, sent_RS):
        return sent_RS

    def whole(self):
        return contextlib.nullcontext()


@pytest.fixture
def group() -> OneOfOne:
    return OneOfOne()


@pytest.fixture
def engine(group, moe_folder) -> Iterator[WideEngine]:
    config = EngineConfig(block_tokens=4, kv_memory_mib=1, max_running=8, replicas=2, ep=WideConfig(ranks=2, timeout_s=HUNG_S))
    with contextlib.closing(WideEngine(group, moe_folder, config, SEQ_LEN)) as engine:  # type: ignore[arg-type]
        yield engine


@asynccontextmanager
async def driving(engine: WideEngine) -> AsyncIterator[WideDriver]:
    driver = WideDriver(engine)
    task = asyncio.create_task(driver.drive())
    try:
        yield driver
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def version(folder, number: int = 1) -> PolicyVersion:
    return PolicyVersion(number, fingerprint_file(folder / "model.safetensors")[0], 0, str(folder))


def not_asked(values: list[int]) -> list[int]:
    """The vote of a rank without work that has version 0 and was asked for no other."""
    return [0, values[1], 0, 0, 0, 0]


async def test_a_rank_alone_says_what_an_engine_says(engine, moe_folder):
    requests = [ask(f"r{i}", prompt(i, 5 + 3 * i)) for i in range(4)]
    expected = run(make_engine(moe_folder), requests)
    async with driving(engine) as driver:
        found = await asyncio.gather(*(driver.generate(request) for request in requests))
    for completion in found:
        assert completion.tokens_N.tolist() == expected[completion.id].tokens_N.tolist()
        torch.testing.assert_close(completion.logprobs_N, expected[completion.id].logprobs_N, rtol=0, atol=1e-5)


async def test_a_commit_that_not_all_ranks_are_asked_for_is_refused_at_the_deadline_and_the_old_version_stays(engine, group, other_folder):
    group.others = not_asked
    async with driving(engine) as driver:
        await driver.prepare(version(other_folder))
        waiting = asyncio.create_task(driver.commit(1))
        await asyncio.sleep(0.3)
        pass_deadlines()
        with pytest.raises(EngineUnavailable, match=rf"not all 1 ranks were asked for it within {HUNG_S:g} s .*timeout_s.*version 0 stays"):
            await waiting
        assert engine.state().live_version == 0 and engine.pending is None and driver.ready
        assert group.votes < 10, "nobody has work: the vote was repeated for nothing"
        group.others = lambda values: values
        await driver.commit(1)
        await driver.commit(1)
        assert engine.state().live_version == 1


async def test_a_commit_goes_live_when_the_last_rank_was_asked(engine, group, other_folder):
    group.others = not_asked
    async with driving(engine) as driver:
        await driver.prepare(version(other_folder))
        waiting = asyncio.create_task(driver.commit(1))
        await asyncio.sleep(0.05)
        assert not waiting.done() and engine.state().live_version == 0
        group.others = lambda values: values
        engine.bell._others = [engine.bell._socket.getsockname()]  # the rank that was asked rings
        engine.bell.ring(engine._votes + 1)
        await waiting
        assert engine.state().live_version == 1


async def test_the_same_number_with_other_weights_is_not_the_same_version(engine, group, other_folder):
    """A rank that would load something else under the number does not go live with this one."""
    group.others = lambda values: [0, values[1], values[2], values[3] + 1, values[4], values[5] - 1]
    async with driving(engine) as driver:
        await driver.prepare(version(other_folder))
        waiting = asyncio.create_task(driver.commit(1))
        await until(lambda: engine.pending == 1)
        pass_deadlines()
        with pytest.raises(EngineUnavailable, match="was not committed"):
            await waiting
        assert engine.state().live_version == 0


async def test_what_is_not_prepared_is_refused_at_once_and_nothing_is_prepared_during_a_commit(engine, group, moe_folder, other_folder):
    group.others = not_asked
    async with driving(engine) as driver:
        with pytest.raises(EngineError, match="prepare it first"):
            await driver.commit(7)
        await driver.prepare(version(other_folder))
        waiting = asyncio.create_task(driver.commit(1))
        await asyncio.sleep(0)
        await driver.prepare(version(other_folder))  # the same again: what a pool does before each commit
        with pytest.raises(EngineUnavailable, match="version 2 cannot be prepared while version 1 is being committed"):
            await driver.prepare(version(moe_folder, 2))
        pass_deadlines()
        with pytest.raises(EngineUnavailable, match="was not committed"):
            await waiting


async def test_a_ring_for_a_vote_that_is_over_wakes_nobody(engine, group):
    engine.bell._others = [engine.bell._socket.getsockname()]
    async with driving(engine) as driver:
        await driver.generate(ask("a", prompt(1, 4)))
        await until(lambda: not engine.has_work)
        votes = group.votes
        engine.bell.ring(votes)
        engine.bell._socket.sendto(b"not a ring", engine.bell._socket.getsockname())
        engine.bell._socket.sendto(b"x" * 16 + (99).to_bytes(8, "big"), engine.bell._socket.getsockname())
        await asyncio.sleep(0.05)
        assert group.votes == votes
        engine.bell.ring(votes + 1)
        await until(lambda: group.votes > votes)
        assert group.votes == votes + 1 and not engine.has_work


async def test_a_paused_rank_takes_part_in_the_steps_of_the_others(engine, group):
    group.others = lambda values: [1, *values[1:]]
    engine.pause()
    engine.add(ask("a", prompt(1, 4)))
    for _ in range(3):
        engine._asked = True
        assert not engine.step().finished
    assert engine.idle_steps == 3 and engine.tokens_generated == 0 and engine.shared.done == len(engine.spec.moe_layers)


async def test_every_metric_of_a_rank_is_there(engine):
    async with driving(engine) as driver:
        await driver.generate(ask("a", prompt(1, 4)))
        values = driver.more_values()
    for layer in range(len(engine.spec.moe_layers)):
        for what in ("dispatch", "compute", "combine"):
            assert values[f"engine/ep/{what}_s/{layer}"] > 0
    assert values["engine/ep/served_pairs"] == engine.shared.load_LE.sum() > 0


def test_an_engine_with_shared_experts_does_not_take_the_fused_path(engine, moe_folder):
    assert run(engine, [ask("a", prompt(1, 6))])
    assert engine._runner._fused is None
    alone = make_engine(moe_folder)
    run(alone, [ask("a", prompt(1, 6))])
    assert alone._runner._fused is not None or torch.backends.mkl.is_available() is False
