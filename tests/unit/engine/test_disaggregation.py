"""A prefill and a decode engine together say what one engine says, whatever becomes of the prefill engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.config.disaggregation import DisaggregationConfig
from slipstream.engine.driver import EngineDriver
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.handoff.listener import HandoffListener
from slipstream.engine.handoff.roles import decode_role, form_of
from slipstream.engine.handoff.source import HandoffSource
from slipstream.engine.local import local_engine
from slipstream.types import Completion, GenerateRequest
from tests.unit.engine.helpers import ask, make_engine, prompt, run
from tests.waiting import HUNG_S, until

CONFIG = DisaggregationConfig(timeout_s=HUNG_S)


@dataclass
class Pair:
    """Engines with prompts going to `at`."""

    prefill: EmbeddedEngine
    decode: EmbeddedEngine
    driver: EngineDriver
    listener: HandoffListener
    at: str
    source: HandoffSource

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.driver.generate(replace(request, prefill_at=self.at))


@asynccontextmanager
async def pair(prefill: EmbeddedEngine, decode: EmbeddedEngine, config: DisaggregationConfig = CONFIG) -> AsyncIterator[Pair]:
    async with local_engine(prefill) as giver, local_engine(decode) as taker:
        listener = HandoffListener(giver, form_of(prefill), prefill.seq_len, "token", config, giver.handoffs)
        at = listener.start("127.0.0.1", 0)
        source = decode_role(taker, decode, "token", config)
        try:
            yield Pair(prefill, decode, taker, listener, at, source)
        finally:
            listener.close()
            source.close()
    prefill.check_integrity()
    decode.check_integrity()


def same(got: Completion, expected: Completion) -> None:
    assert got.tokens_N.tolist() == expected.tokens_N.tolist()
    assert np.abs(got.logprobs_N - expected.logprobs_N).max() <= 1e-5  # others are in the batch, so float32 sums round differently
    assert got.routing is not None and expected.routing is not None
    assert got.routing.valid_T.all() and np.array_equal(got.routing.ids_TLK, expected.routing.ids_TLK)


def requests() -> list[GenerateRequest]:
    """Short and long, with a shared beginning, one that ends at a block's end, sampled and greedy."""
    shared = prompt(9, 40)
    tails = [prompt(i, 5 + 9 * i) for i in range(4)]
    return [
        ask("short", prompt(1, 3)),
        ask("whole", prompt(2, 64), temperature=0.8, seed=3),
        ask("one more", prompt(3, 65)),
        *(ask(f"shared {i}", np.concatenate([shared, tail]), temperature=1.0, seed=i) for i, tail in enumerate(tails)),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["shared_memory", "socket"])
async def test_tokens_logprobs_and_routing_are_those_of_one_engine(moe_folder: Path, dtype: str, transport):
    expected = run(make_engine(moe_folder, dtype=dtype, max_step_tokens=64), requests())
    config = DisaggregationConfig(transport=transport, timeout_s=HUNG_S)
    engines = [make_engine(moe_folder, dtype=dtype, max_step_tokens=64) for _ in range(2)]
    async with pair(*engines, config) as both:
        got = await asyncio.gather(*(both.generate(request) for request in requests()))
        counts = both.driver.handoffs
    for completion in got:
        same(completion, expected[completion.id])
    by_id = {completion.id: completion for completion in got}
    assert by_id["whole"].cached_by_tier == {"peer": 63} and by_id["one more"].cached_by_tier == {"peer": 64}
    assert by_id["short"].cached_by_tier == {}
    assert counts["failures"] == 0 and 3.5 * counts["blocks"] < counts["tokens"] < 4 * counts["blocks"] and counts["tokens"] > 200
    assert (counts["shared_bytes"] == counts["bytes"]) is (transport == "shared_memory")
    assert both.decode.tokens_prefilled == len(requests()) - 1 + 3  # of each prompt its last token, and the short one, which stayed


async def test_a_later_turn_fetches_only_what_it_does_not_have(moe_folder):
    first_T = prompt(1, 40)
    async with pair(make_engine(moe_folder), make_engine(moe_folder)) as both:
        first = await both.generate(ask("r/0", first_T))
        later_T = np.concatenate([first_T, first.tokens_N, prompt(2, 30)])
        moved = both.driver.handoffs["blocks"]
        second = await both.generate(ask("r/1", later_T))
        moved = both.driver.handoffs["blocks"] - moved
    (expected,) = run(make_engine(moe_folder), [ask("r/1", later_T)]).values()
    same(second, expected)
    assert moved == -(-(len(later_T) - 1) // 4) - (len(first_T) + len(first.tokens_N) - 1) // 4


async def test_a_prefill_engine_that_dies_in_a_handoff_costs_time_and_nothing_else(moe_folder, caplog):
    prefill = make_engine(moe_folder, max_step_tokens=64, max_running=8)
    (expected,) = run(make_engine(moe_folder, max_step_tokens=64, max_running=8), [ask("r", prompt(5, 100))]).values()
    async with pair(prefill, make_engine(moe_folder, max_step_tokens=64, max_running=8)) as both:
        step = prefill.step

        def last_step():
            result = step()
            both.listener.close()  # as a kill does: the connection ends after the first chunk
            prefill.pause()
            return result

        prefill.step = last_step
        both.source.peers._clock = lambda: 0.0  # however long the second request takes, it is within the pause
        same(await both.generate(ask("r", prompt(5, 100))), expected)
        same(
            replace(await both.generate(ask("again", prompt(6, 50)))), run(make_engine(moe_folder), [ask("again", prompt(6, 50))])["again"]
        )
        assert both.driver.handoffs["failures"] == 1 and both.source.peers.away == 1
        assert both.driver.handoffs["fetches"] == 1  # the second request did not even ask
    assert sum("prompts are computed here" in record.message for record in caplog.records) == 1


async def test_a_peer_may_come_back(moe_folder):
    async with pair(make_engine(moe_folder), make_engine(moe_folder)) as both:
        now = [0.0]
        both.source.peers._clock = lambda: now[0]
        at, both.at = both.at, "127.0.0.1:9"
        await both.generate(ask("a", prompt(1, 30)))
        assert both.driver.handoffs == Counter(fetches=1, failures=1) | both.driver.handoffs and not both.source.peers.may_ask(both.at)
        now[0] = 100.0
        assert both.source.peers.may_ask(both.at)
        both.at = at
        assert (await both.generate(ask("b", prompt(2, 30)))).cached_by_tier == {"peer": 29}


async def test_a_slow_peer_is_waited_for_until_the_deadline(moe_folder):
    prefill = make_engine(moe_folder)
    prefill.pause()
    async with pair(prefill, make_engine(moe_folder), DisaggregationConfig(timeout_s=0.2)) as both:
        got = await both.generate(ask("r", prompt(5, 60)))
        assert both.driver.handoffs["failures"] == 1 and both.source.peers.failures["deadline"] == 1
        await until(lambda: not prefill.state().waiting)  # the prefill engine drops the work: nobody waits for it
    same(got, run(make_engine(moe_folder), [ask("r", prompt(5, 60))])["r"])


async def test_an_aborted_request_ends_its_prefill(moe_folder):
    prefill = make_engine(moe_folder)
    prefill.pause()
    async with pair(prefill, make_engine(moe_folder)) as both:
        task = asyncio.create_task(both.generate(ask("r", prompt(5, 60))))
        await until(lambda: prefill.state().waiting)
        task.cancel()
        await until(lambda: not prefill.state().waiting)
        assert both.driver.handoffs["failures"] == 0


async def test_an_engine_that_ends_does_not_wait_for_its_handoffs(moe_folder):
    prefill = make_engine(moe_folder)
    prefill.pause()
    async with pair(prefill, make_engine(moe_folder)) as both:
        task = asyncio.create_task(both.generate(ask("r", prompt(5, 60))))
        await until(lambda: prefill.state().waiting)
        both.source.close()
        await asyncio.wait_for(asyncio.to_thread(both.source._threads.shutdown), HUNG_S / 2)
        same(await task, run(make_engine(moe_folder), [ask("r", prompt(5, 60))])["r"])


async def test_blocks_of_an_older_policy_than_the_salt_are_computed_here(moe_folder, other_folder):
    """The prefill engine has not got the new weights yet."""
    decode = make_engine(other_folder, version=1)
    async with pair(make_engine(moe_folder, version=0), decode) as both:
        got = await both.generate(ask("r", prompt(5, 60), salt=1))
        assert both.source.peers.failures == {"version": 1} and both.source.peers.may_ask(both.at)
    same(got, run(make_engine(other_folder, version=1), [ask("r", prompt(5, 60), salt=1)])["r"])
    assert got.kv_age == 0


async def test_another_model_is_refused_loudly(dense_folder, moe_folder, caplog):
    async with pair(make_engine(dense_folder), make_engine(moe_folder)) as both:
        got = await both.generate(ask("r", prompt(5, 60)))
        assert both.source.peers.failures == {"layout": 1}
    same(got, run(make_engine(moe_folder), [ask("r", prompt(5, 60))])["r"])
    assert any(record.levelname == "ERROR" and "another form" in record.message for record in caplog.records)


async def test_other_weights_under_the_same_number_are_refused_loudly(other_folder, moe_folder, caplog):
    async with pair(make_engine(other_folder), make_engine(moe_folder)) as both:
        await both.generate(ask("r", prompt(5, 60)))
        assert both.source.peers.failures == {"weights": 1}
    assert any(record.levelname == "ERROR" and "other weights" in record.message for record in caplog.records)
