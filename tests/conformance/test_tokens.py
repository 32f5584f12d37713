"""Token accounting and the ends of a reply. `Live.answer` checks the accounts of every completion of the suite."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.types import TokenPiece
from tests.conformance.conftest import Live, check_accounts
from tests.conformance.material import SEQ_LEN, A, prompt


async def test_a_completion_accounts_for_each_of_its_tokens(live: Live):
    await live.together([live.request(prompt(seed, 1 + 5 * seed), max_tokens=1 + seed) for seed in range(12)])


@pytest.mark.needs("model")
async def test_max_tokens_ends_a_reply_with_length(live: Live):
    done = await live.together([live.request(seed, seed=seed, max_tokens=5) for seed in range(8)])
    assert "length" in {completion.finish_reason for _, completion in done}


@pytest.mark.needs("model")
async def test_a_full_context_ends_a_reply_with_length(live: Live):
    for room in (1, 3):
        completion = await live.ask(prompt(room, SEQ_LEN - room), seed=2, max_tokens=50)
        assert len(completion.tokens_N) <= room
        assert len(completion.tokens_N) == room or completion.finish_reason == "stop"


@pytest.mark.needs("model")
async def test_a_stop_id_ends_a_reply_and_is_its_last_token(live: Live):
    free = await live.ask(3, temperature=0.0, max_tokens=12)
    stop = int(free.tokens_N[4])
    first = free.tokens_N.tolist().index(stop)
    stopped = await live.ask(3, temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    assert stopped.finish_reason == "stop" and stopped.tokens_N.tolist() == free.tokens_N[: first + 1].tolist()


@pytest.mark.needs("model")
async def test_a_stop_text_ends_a_reply_and_the_tokens_that_made_it_are_kept(live: Live):
    decode = live.material.tokenizer.decode
    free = (await live.ask(4, temperature=0.0, max_tokens=24)).tokens_N.tolist()
    text = [c for c in decode(free) if c.isascii() and c.isalnum()][-1]
    first = next(n for n in range(1, len(free) + 1) if text in decode(free[:n]))
    stopped = await live.ask(4, temperature=0.0, max_tokens=24, stop=(text,))
    assert stopped.finish_reason == "stop" and stopped.tokens_N.tolist() == free[:first]
    assert len(stopped.logprobs_N) == first


@pytest.mark.needs("model")
async def test_requests_in_one_batch_get_what_each_gets_alone(live: Live):
    ask = {"temperature": 0.0, "max_tokens": 6}
    together = await live.together([live.request(prompt(seed, 3 + 7 * seed), **ask) for seed in range(10)])
    for request, completion in together:
        live.check(1, request, completion)
        alone = await live.ask(request.prompt_T, **ask)
        assert alone.tokens_N.tolist() == completion.tokens_N.tolist()


@pytest.mark.needs("model", "stream")
@pytest.mark.parametrize("sampling", [{"seed": 6}, {"temperature": 0.0}, {"temperature": 0.0, "stop": ("a", "e", "o", "1")}])
async def test_a_stream_is_heard_in_order_and_gives_what_the_request_gives_without(live: Live, sampling):
    request, pieces = live.request(6, max_tokens=12, **sampling), list[TokenPiece]()
    done = await live.engine.stream(request, pieces.append)  # type: ignore[attr-defined]
    check_accounts(live.material, live.subject, request, done)
    live.check(A, request, done)
    heard_N, logprobs_N = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("tokens_N", "logprobs_N"))
    count = len(heard_N)
    assert 0 < count < len(done.tokens_N) and {piece.version for piece in pieces} == {A}
    assert heard_N.tolist() == done.tokens_N[:count].tolist() and logprobs_N.tolist() == done.logprobs_N[:count].tolist()
    without = await live.ask(6, max_tokens=12, **sampling)
    assert (done.tokens_N.tolist(), done.finish_reason) == (without.tokens_N.tolist(), without.finish_reason)
