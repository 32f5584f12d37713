"""The prefix cache: who finds whose blocks, and that finding them changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.conftest import Live
from tests.conformance.material import A, B, prompt

pytestmark = pytest.mark.needs("model")
ASK = {"temperature": 0.0, "max_tokens": 6}


def long_prompt(live: Live, seed: int) -> np.ndarray:
    return prompt(seed, 2 * live.subject.block_tokens + 5)


async def test_the_same_prompt_and_salt_hits_whole_blocks_and_gives_the_same_reply(live: Live):
    prompt_T = long_prompt(live, 100)
    first = await live.ask(prompt_T, **ASK)
    request, second = await live.answer(live.request(prompt_T, **ASK))
    assert (first.cached_tokens, second.cached_tokens) == (0, 2 * live.subject.block_tokens)
    assert second.tokens_N.tolist() == first.tokens_N.tolist()
    live.check(A, request, second)


async def test_another_salt_finds_nothing(live: Live):
    prompt_T = long_prompt(live, 101)
    await live.ask(prompt_T, **ASK)
    assert (await live.ask(prompt_T, salt=7, **ASK)).cached_tokens == 0
    assert (await live.ask(prompt_T, salt=7, **ASK)).cached_tokens > 0


async def test_a_later_turn_keeps_its_salt_over_an_update_and_a_new_rollout_reads_no_old_kv(live: Live):
    prompt_T = long_prompt(live, 102)
    await live.ask(prompt_T, **ASK)
    await live.swap(live.material.versions[B])
    later = await live.ask(prompt_T, **ASK)
    assert later.cached_tokens > 0 and later.kv_age == B - A and later.versions[0][0] == B
    request, new = await live.answer(live.request(prompt_T, salt=B, **ASK))
    assert new.cached_tokens == 0 and new.kv_age == 0
    live.check(B, request, new)
