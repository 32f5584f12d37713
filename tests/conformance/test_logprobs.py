"""The logprob contract: of the sampled token, under the distribution that it was sampled from; and that it was sampled from it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.conftest import Live
from tests.conformance.material import A, prompt, sampled_from

WAYS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.5": {"temperature": 1.5},
    "top-k": {"temperature": 1.2, "top_k": 5},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
}
pytestmark = pytest.mark.needs("model")


@pytest.mark.parametrize("way", WAYS)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(live: Live, way: str):
    for request, completion in await live.together([live.request(seed, seed=seed, max_tokens=12, **WAYS[way]) for seed in range(6)]):
        live.check(A, request, completion)


async def test_greedy_takes_the_most_likely_token(live: Live):
    request, completion = await live.answer(live.request(5, temperature=0.0, max_tokens=20))
    logprobs_NV = live.material.logits(A, request.prompt_T, completion)
    taken_N = logprobs_NV[np.arange(len(logprobs_NV)), completion.tokens_N]
    assert (taken_N >= logprobs_NV.max(-1) - live.subject.atol).all()


async def test_tokens_are_drawn_as_often_as_the_distribution_says(live: Live):
    """Mean surprise of 256 draws against the entropy: four standard errors."""
    requests = [live.request(6, seed=seed, max_tokens=1, temperature=0.7) for seed in range(256)]
    draws = []
    for first in range(0, 256, 16):
        draws += [completion for _, completion in await live.together(requests[first : first + 16])]
    logprobs_V = sampled_from(live.material.logits(A, requests[0].prompt_T, draws[0]), requests[0].sampling)[0]
    probs_V = np.exp(logprobs_V)
    entropy = -(probs_V * logprobs_V).sum()
    spread = np.sqrt((probs_V * (logprobs_V + entropy) ** 2).sum() / 256)
    assert abs(-np.mean([draw.logprobs_N[0] for draw in draws]) - entropy) < 4 * spread
    assert len({int(draw.tokens_N[0]) for draw in draws}) > 20


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(live: Live):
    ask = {"temperature": 1.0, "max_tokens": 10}
    alone = await live.ask(7, seed=11, **ask)
    others = [live.request(prompt(seed, 4 + seed), seed=seed, **ask) for seed in range(10)]
    (_, again), *_ = await live.together([live.request(7, seed=11, **ask), *others])
    assert again.tokens_N.tolist() == alone.tokens_N.tolist()


async def test_other_seeds_and_no_seed_give_other_tokens(live: Live):
    ask = {"temperature": 1.5, "max_tokens": 10}
    requests = [live.request(8, seed=seed, **ask) for seed in (1, 2, None, None)]
    done = [tuple(completion.tokens_N.tolist()) for _, completion in await live.together(requests)]
    assert len(set(done)) == 4
