"""The router's memory and decisions over scripted answers: stickiness, moves and their reasons, what it learns, what it forgets."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.router import RouterConfig, RouterWeights
from slipstream.serving.routing.router import Router, Sent, session_of
from slipstream.types import Completion, EngineState, GenerateRequest, Sampling, Timings

NAMES = ["engine-0", "engine-1", "engine-2"]
BLOCK = 16


def make(policy: str = "kv_aware", **config) -> Router:
    router = Router(RouterConfig(policy=policy, **config))
    for name in NAMES:
        router.observe(name, EngineState(0, "", kv_tokens=4096, block_tokens=BLOCK))
    return router


def ask(name: str, tokens: int, seed: int = 0) -> GenerateRequest:
    prompt_T = np.random.default_rng(seed).integers(0, 100, 4096).astype(np.int32)[:tokens]
    return GenerateRequest(name, prompt_T, Sampling())


def send(router: Router, request: GenerateRequest, now: float = 0.0, usable=NAMES, away=lambda name: "down") -> Sent:
    return router.choose(router.ask(request), usable, away, now)


def answer(router: Router, sent: Sent, cached: int | None = None, sampled: int = 4, now: float = 1.0, prefill_s: float = 0.0) -> None:
    cached = sent.held if cached is None else cached
    tokens_N = np.full(sampled, 7, np.int32)
    timings = Timings(0.0, prefill_s, 0.0)
    router.answered(
        sent, Completion("x", tokens_N, np.zeros(sampled, np.float32), ((0, sampled),), "stop", cached_tokens=cached, timings=timings), now
    )
    router.ended(sent)


def test_the_session_of_a_request_is_its_id_without_the_turn():
    assert (session_of("env/train/3/0/7"), session_of("alone")) == ("env/train/3/0", "alone")


@pytest.mark.parametrize("policy", ["kv_aware", "consistent_hash", "least_loaded", "two_choices", "round_robin"])
@given(order=st.lists(st.integers(0, 7), min_size=8, max_size=60))
@settings(max_examples=25, deadline=None)
def test_turns_of_a_session_stay_where_its_first_went(policy, order):
    router, homes, turns = make(policy), {}, dict.fromkeys(range(8), 0)
    for session in order:
        turns[session] += 1
        sent = send(router, ask(f"s{session}/{turns[session]}", 64 + 48 * turns[session], seed=session))
        assert homes.setdefault(session, sent.replica) == sent.replica
        answer(router, sent)
    assert not router.moves


@given(st.integers(3, 60))
@settings(max_examples=20, deadline=None)
def test_sessions_of_equal_size_spread_evenly(count):
    router = make()
    for session in range(count):
        send(router, ask(f"s{session}/0", 160, seed=session))
    sizes = sorted(router.requests[name] for name in NAMES)
    assert sizes[-1] - sizes[0] <= 1


def test_a_session_whose_replica_is_away_goes_elsewhere_stays_there_and_the_reason_is_counted():
    router = make()
    first = send(router, ask("s/0", 320))
    answer(router, first)
    others = [name for name in NAMES if name != first.replica]
    second = send(router, ask("s/1", 352), usable=others, away=lambda name: "breaker")
    answer(router, second)
    assert second.replica in others and second.held == 0 and router.moves == {"breaker": 1}
    assert send(router, ask("s/2", 384)).replica == second.replica


def test_rollouts_of_one_group_go_where_the_prompt_is_going_already():
    router = make(weights=RouterWeights(pending=0.5, requests=1, resident=0))
    first, second = send(router, ask("g/0/0", 1000)), send(router, ask("g/1/0", 1000))
    assert second.replica == first.replica and (first.held, second.held) == (0, 992)


def test_the_next_turn_finds_prompt_and_completion_but_not_the_last_token_which_was_not_processed():
    router = make()
    request = ask("s/0", 60)
    sent = send(router, request)
    answer(router, sent, sampled=5)
    longer_T = np.concatenate([request.prompt_T, np.full(5, 7, np.int32), np.zeros(40, np.int32)])
    assert send(router, GenerateRequest("s/1", longer_T, Sampling())).held == 64
    router = make()
    sent = send(router, request)
    answer(router, sent, sampled=4)
    longer_T = np.concatenate([request.prompt_T, np.full(4, 7, np.int32), np.zeros(40, np.int32)])
    assert send(router, GenerateRequest("s/1", longer_T, Sampling())).held == 48


def test_prefixes_under_another_salt_are_other_prefixes():
    router = make()
    answer(router, send(router, ask("a/0", 320)))
    request = ask("b/0", 320)
    assert send(router, GenerateRequest("b/0", request.prompt_T, Sampling(), salt=1)).held == 0


def test_an_answer_with_fewer_cached_tokens_than_expected_corrects_the_picture():
    router = make()
    old, new = (send(router, ask(f"{name}/0", 320, seed=i), usable=NAMES[:1]) for i, name in enumerate("ab"))
    answer(router, old)
    answer(router, new)
    again = send(router, ask("b/1", 336, seed=1), usable=NAMES[:1])
    assert again.held == 320
    answer(router, again, cached=0)
    assert send(router, ask("a/1", 336, seed=0), usable=NAMES[:1]).held == 0, "older than what was reclaimed"
    assert send(router, ask("b/2", 352, seed=1), usable=NAMES[:1]).held == 336, "computed again"
    assert router.tokens == {"prompt": 976, "predicted": 320, "cached": 0}


def test_a_restart_empties_the_picture_and_uptime_that_falls_is_a_restart():
    router = make()
    sent = send(router, ask("s/0", 320))
    answer(router, sent)
    router.observe(sent.replica, EngineState(0, "", kv_tokens=4096, block_tokens=BLOCK, uptime_s=50.0))
    assert send(router, ask("s/1", 336)).held == 320
    router.observe(sent.replica, EngineState(0, "", kv_tokens=4096, block_tokens=BLOCK, uptime_s=1.0))
    assert send(router, ask("s/2", 336), usable=[sent.replica]).held == 0


def test_a_replica_is_not_believed_to_hold_more_than_it_says_that_it_can():
    router = make()
    for session in range(3):
        answer(router, send(router, ask(f"s{session}/0", 1600, seed=session), usable=NAMES[:1]))
    assert send(router, ask("s0/1", 1616, seed=0), usable=NAMES[:1]).held < 1600
    assert send(router, ask("s2/1", 1616, seed=2), usable=NAMES[:1]).held > 0


def test_new_sessions_avoid_replicas_that_are_full_of_other_sessions():
    router = make()
    big = send(router, ask("big/0", 3200, seed=1))
    answer(router, big, now=1.0)
    placed = {send(router, ask(f"s{i}/0", 160, seed=10 + i), now=2.0).replica for i in range(6)}
    assert big.replica not in placed
    assert big.replica in {send(router, ask(f"t{i}/0", 160, seed=20 + i), now=200.0).replica for i in range(6)}, "idle for long"


def test_a_replica_that_takes_far_longer_for_a_token_than_the_others_is_named():
    router = make()
    for turn in range(8):
        for name, seconds in zip(NAMES, (1.0, 1.1, 20.0), strict=True):
            answer(router, send(router, ask(f"{name}/{turn}", 32), usable=[name]), now=seconds)
        assert router.slow(NAMES) == ("engine-2" if turn == 7 else None)
    router.forgive("engine-2")
    assert router.slow(NAMES) is None


def test_the_clocks_of_hosts_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    def decisions():
        router = make()
        chosen = []
        for i in range(12):
            sent = send(router, ask(f"s{i % 5}/{i}", 160 + 16 * i, seed=i % 5), now=float(i))
            answer(router, sent, now=i + 0.5, prefill_s=0.1)
            chosen.append((sent.replica, sent.held))
        return chosen

    expected = decisions()
    monkeypatch.setattr(time, "time", iter(range(10**6, 0, -3600)).__next__)
    monkeypatch.setattr(time, "monotonic", lambda: pytest.fail("the router has read a clock of its own"))
    assert decisions() == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
@settings(max_examples=40, deadline=None)
def test_what_is_in_flight_is_what_was_sent_and_has_not_ended(steps):
    router, under_way = make(), []
    for i, (session, ends) in enumerate(steps):
        if ends and under_way:
            sent = under_way.pop(session % len(under_way))
            if session % 2:
                answer(router, sent, now=float(i))
            else:
                router.ended(sent)
        else:
            under_way.append(send(router, ask(f"s{session}/{i}", 64, seed=session), now=float(i)))
        for name in NAMES:
            assert router.in_flight(name) == sum(sent.replica == name for sent in under_way)
    assert sum(router.decisions.values()) == sum(router.requests.values())
