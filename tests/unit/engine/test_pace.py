"""What waits while others decode: a little of it in each step, more the longer it lasts, in order, and never another token."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slipstream.engine.kv import BlockPool
from slipstream.engine.pace import Pace
from slipstream.engine.prefix import PrefixCache
from slipstream.serving.keys import extend_keys, tail_key
from tests.unit.engine.helpers import ask, make_engine, prompt, run
from tests.unit.engine.sources import held_by, with_source
from tests.unit.engine.test_disaggregation import pair, same

PROMPT = prompt(1, 41)


@pytest.fixture(scope="module")
def computed(moe_folder):
    """(completion, blocks by key) of an engine that has computed PROMPT."""
    engine = make_engine(moe_folder)
    return run(engine, [ask("a", PROMPT)])["a"], held_by(engine)


def test_a_limit_doubles_while_it_is_in_the_way_and_then_starts_again():
    pace = Pace(3)
    limits = []
    for _ in range(17):
        limits.append(pace.limit)
        pace.note(was_short=True)
    assert limits == [3] * 8 + [6] * 8 + [12]
    pace.note(was_short=False)
    assert pace.limit == 3


def decoding(moe_folder, **config):
    """An engine in which somebody decodes."""
    engine = make_engine(moe_folder, **config)
    engine.add(ask("other", prompt(7, 5), max_tokens=100, temperature=1.0, seed=9))
    engine.step()
    return engine


def test_blocks_that_arrive_at_once_are_copied_over_several_steps_in_which_others_decode(moe_folder, computed):
    engine = decoding(moe_folder)
    engine._scheduler.copies = Pace(3)
    source = with_source(engine, held=computed[1])
    engine.add(ask("a", PROMPT))
    engine.step()
    source.fetches[0].arrive()
    for copied in (3, 6, 9):
        before = engine.tokens_generated
        engine.step()
        assert sum(source.fetches[0].writes) == copied and engine.tokens_generated == before + 1
    done = run(engine, [])["a"]
    assert source.fetches[0].writes == [3, 3, 3, 1] and done.cached_by_tier == {"peer": 40}
    same(done, computed[0])


def test_several_fetches_share_the_limit_and_the_oldest_comes_first(moe_folder, computed):
    other = make_engine(moe_folder)
    run(other, [ask("b", prompt(2, 21))])
    engine = decoding(moe_folder)
    engine._scheduler.copies = Pace(8)
    source = with_source(engine, held={**computed[1], **held_by(other)})
    for name, tokens_T in (("a", PROMPT), ("b", prompt(2, 21))):
        engine.add(ask(name, tokens_T))
    engine.step()
    for fetch in reversed(source.fetches):
        fetch.arrive()
    engine.step()
    assert [fetch.writes for fetch in source.fetches] == [[8], []]
    engine.step()
    assert [fetch.writes for fetch in source.fetches] == [[8, 2], [5]]
    done = run(engine, [])
    assert [done[name].cached_tokens for name in "ab"] == [40, 20]


def test_a_source_that_ends_in_the_middle_of_a_spread_copy_gives_what_it_had(moe_folder, computed):
    engine = decoding(moe_folder)
    engine._scheduler.copies = Pace(2)
    source = with_source(engine, held=computed[1])
    engine.add(ask("a", PROMPT))
    engine.step()
    source.fetches[0].payloads[5] = None
    source.fetches[0].arrive()
    done = run(engine, [])["a"]
    assert source.fetches[0].writes == [2, 2, 1] and done.cached_by_tier == {"peer": 20}
    same(done, computed[0])


def test_where_nobody_runs_everything_is_copied_at_once(moe_folder, computed):
    engine = make_engine(moe_folder)
    engine._scheduler.copies = Pace(1)
    source = with_source(engine, held=computed[1], at_once=True)
    same(run(engine, [ask("a", PROMPT)])["a"], computed[0])
    assert source.fetches[0].writes == [10]


def prefilled(engine, steps: int) -> list[int]:
    """Prompt tokens that each step computes."""
    counts = [engine.tokens_prefilled]
    for _ in range(steps):
        engine.step()
        counts.append(engine.tokens_prefilled)
    return np.diff(counts).tolist()


def test_a_decode_engine_computes_prompts_a_few_tokens_at_a_time_and_more_when_they_do_not_end(moe_folder):
    (expected,) = run(make_engine(moe_folder), [ask("long", prompt(4, 100))]).values()
    engine = decoding(moe_folder)
    engine.yield_to_decoding(4)
    engine.add(ask("short", prompt(3, 10), max_tokens=2))
    assert prefilled(engine, 4) == [4, 4, 2, 0]
    engine.add(ask("long", prompt(4, 100)))
    assert prefilled(engine, 13) == [4] * 8 + [8] * 5
    engine.add(ask("next", prompt(5, 9), max_tokens=2))
    same(run(engine, [])["long"], expected)


def test_a_decode_engine_in_which_nobody_decodes_computes_prompts_as_fast_as_it_can(moe_folder):
    engine = make_engine(moe_folder)
    engine.yield_to_decoding(4)
    engine.add(ask("long", prompt(4, 100)))
    assert prefilled(engine, 1) == [100]


async def test_of_a_prompt_that_was_handed_over_only_the_last_token_is_computed_also_by_its_siblings(moe_folder):
    """They share the block that the prompt ends in and go on in different ways: each has a copy."""
    group = [ask(f"g/{i}", prompt(5, 50), temperature=1.0, seed=i) for i in range(4)]
    expected = run(make_engine(moe_folder), group)
    assert len({completion.tokens_N[0] for completion in expected.values()}) > 1
    decode = make_engine(moe_folder)
    async with pair(make_engine(moe_folder), decode) as both:
        for completion in await asyncio.gather(*(both.generate(request) for request in group)):
            same(completion, expected[completion.id])
            assert completion.cached_tokens == 49
        assert decode.tokens_prefilled == 4
        assert both.driver.handoffs["fetches"] == 1 and both.driver.handoffs["tokens"] == 49


def test_a_block_that_is_not_full_is_found_by_its_own_tokens_only_and_is_not_saved_when_it_goes():
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    saved = []
    cache.reclaimed = lambda key, block: saved.append(block)
    keys: list[bytes] = []
    extend_keys(keys, PROMPT[:4], 0, 4)
    tail = tail_key(keys, PROMPT[:6], 0, 4)
    assert tail is not None and tail_key(keys, PROMPT[:4], 0, 4) is None
    assert len({tail, tail_key(keys, PROMPT[:7], 0, 4), tail_key([], PROMPT[:2], 0, 4), tail_key([], PROMPT[:2], 1, 4), *keys}) == 5
    blocks = pool.allocate(2)
    cache.insert(keys[0], blocks[0])
    cache.insert(tail, blocks[1], is_tail=True)
    pool.release(blocks)
    assert cache.has_tails and cache.find_tail(tail) == blocks[1]
    pool.allocate(2)
    assert saved == [blocks[0]] and not cache.has_tails and len(cache) == 0
