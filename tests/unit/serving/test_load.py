"""How far what was sent has come, by answers and by the rate that they show."""

from __future__ import annotations

import pytest

from slipstream.serving.routing.load import Load


def test_an_answer_says_that_what_was_sent_before_it_is_computed_too():
    load = Load()
    places = [load.sent(tokens, now=0.0) for tokens in (100, 200, 300)]
    assert load.look(0.0) == 600
    load.answered(places[1], computed=0, prefill_s=0.0, sampled=1, took_s=1.0, now=1.0)
    assert load.look(1.0) == 300


def test_between_answers_pending_tokens_drain_at_the_rate_that_was_seen():
    load = Load()
    load.answered(load.sent(1000, 0.0), computed=1000, prefill_s=2.0, sampled=1, took_s=2.0, now=2.0)
    load.sent(800, 2.0)
    assert load.look(3.0) == pytest.approx(300)
    assert load.look(9.0) == 0


def test_nothing_is_pending_where_nothing_is_in_flight():
    load = Load()
    load.sent(500, 0.0)
    load.ended()
    assert (load.requests, load.look(0.0)) == (0, 0)


def test_a_prompt_that_was_nearly_all_cached_says_nothing_about_the_rate():
    load = Load()
    load.answered(load.sent(10, 0.0), computed=10, prefill_s=1.0, sampled=1, took_s=1.0, now=1.0)
    load.sent(100, 1.0)
    assert load.look(100.0) == 100


def test_the_time_for_a_token_weighs_answers_by_their_length():
    load = Load()
    for sampled, took_s in ((100, 1.0), (1, 1.0), (100, 1.0)):
        load.answered(load.sent(10, 0.0), computed=10, prefill_s=0.0, sampled=sampled, took_s=took_s, now=1.0)
    assert load.token_s < 0.02
    load.reset()
    assert (load.token_s, load.answers) == (0.0, 0)
