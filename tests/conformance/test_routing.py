"""Router capture: row i is what the experts did when token i was processed, whatever computed or kept its KV."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.types import Completion, GenerateRequest
from tests.conformance.conftest import Live
from tests.conformance.material import A, B, prompt

pytestmark = pytest.mark.needs("routing")
ASK = {"temperature": 1.0, "max_tokens": 10}


def check_rows(live: Live, version: int, request: GenerateRequest, completion: Completion) -> None:
    """Complete, of the right kind, and those of the reference (the order of a token's experts does not matter)."""
    rows, spec = completion.routing, live.material.spec
    assert rows is not None and rows.start == request.routing_from
    total = len(request.prompt_T) + len(completion.tokens_N) - 1
    assert rows.ids_TLK.shape == (total - rows.start, len(spec.moe_layers), spec.top_k) and rows.ids_TLK.dtype == np.uint8
    assert rows.valid_T.all()
    _, wanted_TLK = live.material.references[version].score(np.concatenate([request.prompt_T, completion.tokens_N]))
    same = np.sort(rows.ids_TLK) == np.sort(wanted_TLK[rows.start : total])
    assert same.mean() > 0.995, f"{same.mean():.1%} of the choices are those of the reference"


async def test_every_processed_token_has_a_row_and_it_is_what_the_experts_did(live: Live):
    for request, completion in await live.together([live.request(prompt(300 + s, 5 + 20 * s), seed=s, **ASK) for s in range(8)]):
        check_rows(live, A, request, completion)


async def test_a_prefix_hit_brings_its_rows(live: Live):
    prompt_T = prompt(310, 2 * live.subject.block_tokens + 5)
    await live.ask(prompt_T, seed=1, **ASK)
    request, hit = await live.answer(live.request(prompt_T, seed=2, **ASK))
    assert hit.cached_tokens > 0
    check_rows(live, A, request, hit)


async def test_a_later_turn_asks_for_the_rows_it_does_not_hold(live: Live):
    request, first = await live.answer(live.request(prompt(311, 40), seed=1, **ASK))
    held = len(request.prompt_T) + len(first.tokens_N) - 1
    longer_T = np.concatenate([request.prompt_T, first.tokens_N, prompt(312, 7)])
    check_rows(live, A, *await live.answer(live.request(longer_T, seed=2, routing_from=held, **ASK)))


async def test_rows_after_an_update_are_those_of_the_new_weights(live: Live):
    await live.swap(live.material.versions[B])
    check_rows(live, B, *await live.answer(live.request(prompt(313, 30), salt=B, seed=1, **ASK)))
