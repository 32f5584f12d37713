"""Policies over made-up snapshots: spread, stickiness, what a replica that goes moves, and what outweighs what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.router import RouterConfig, RouterWeights
from slipstream.serving.routing.policies import ConsistentHash, KvAware, LeastLoaded, RoundRobin, TwoChoices, View, make_policy

NAMES = [f"engine-{i}" for i in range(5)]
views_of = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4000), st.integers(0, 64), st.floats(0, 1)), min_size=1, max_size=8).map(
    lambda rows: [View(f"engine-{i}", requests, pending, 16 * held, 0, kv, kv) for i, (requests, pending, held, kv) in enumerate(rows)]
)


@pytest.mark.parametrize("policy", ["kv_aware", "consistent_hash", "least_loaded", "two_choices", "round_robin"])
@given(views=views_of, session=st.text(max_size=8))
@settings(max_examples=50, deadline=None)
def test_every_policy_takes_one_of_those_that_are_offered(policy, views, session):
    assert 0 <= make_policy(RouterConfig(policy=policy)).choose(session, 1024, views).index < len(views)


@pytest.mark.parametrize("policy", ["kv_aware", "least_loaded", "round_robin"])
def test_sessions_that_come_to_idle_replicas_spread_evenly(policy):
    chooser, requests = make_policy(RouterConfig(policy=policy)), Counter()
    for i in range(50):
        views = [View(name, requests=requests[name]) for name in NAMES]
        requests[views[chooser.choose(f"s{i}", 100, views).index].name] += 1
    assert set(requests.values()) == {10}


def test_two_choices_are_nearly_even_and_far_better_than_one():
    chooser, requests = TwoChoices(seed=0), Counter()
    for i in range(1000):
        views = [View(name, requests=requests[name]) for name in NAMES]
        requests[views[chooser.choose(f"s{i}", 100, views).index].name] += 1
    assert max(requests.values()) - min(requests.values()) < 10


def test_round_robin_goes_on_in_order_when_a_replica_goes_and_comes_back():
    chooser = RoundRobin()

    def turn(names):
        return names[chooser.choose("s", 1, [View(name) for name in names]).index]

    assert [turn(NAMES[:3]) for _ in range(4)] == ["engine-0", "engine-1", "engine-2", "engine-0"]
    assert [turn([NAMES[0], NAMES[2]]) for _ in range(2)] == ["engine-2", "engine-0"]
    assert turn(NAMES[:3]) == "engine-1"


def test_a_replica_that_goes_moves_the_sessions_that_it_had_and_no_others():
    chooser, sessions = ConsistentHash(), [f"s{i}" for i in range(200)]

    def homes(names):
        return {session: names[chooser.choose(session, 1, [View(name) for name in names]).index] for session in sessions}

    before, after = homes(NAMES), homes(NAMES[:-1])
    assert all(after[session] == home for session, home in before.items() if home != NAMES[-1])
    assert min(Counter(before.values()).values()) > 20


def test_least_loaded_takes_the_fewest_requests():
    assert LeastLoaded().choose("s", 1, [View("a", requests=3), View("b", requests=1), View("c", requests=2)]).index == 1


def test_the_cost_of_a_replica_is_the_weighted_sum_of_what_is_known_of_it():
    weights = RouterWeights(prefix=2, pending=3, requests=5, waiting=7, resident=19, kv=11, behind=13, stay=17)
    view = View("a", requests=1, pending=10, held=60, waiting=2, resident_frac=2, kv_used_frac=0.5, behind=3, home=True)
    assert KvAware(weights).cost(100, view) == 2 * 40 + 3 * 10 + 5 * 1 + 7 * 2 + 19 * 2 + 11 * 0.5 + 13 * 3 - 17


def test_a_prefix_wins_until_the_load_of_its_replica_costs_more_than_computing_it_again():
    chooser = KvAware(RouterWeights(prefix=1, pending=1, requests=0, resident=0, stay=0))

    def choose(pending):
        return chooser.choose("s", 1000, [View("holds it", held=960, pending=pending), View("idle")])

    assert (choose(900).index, choose(900).reason) == (0, "prefix")
    assert (choose(1000).index, choose(1000).reason) == (1, "load")
    assert chooser.choose("s", 1000, [View("a"), View("b")]).reason == "cold"


def test_a_replica_with_older_weights_is_taken_only_under_much_load():
    views = [View("old", behind=1), View("new", pending=1000)]
    assert KvAware(RouterWeights()).choose("s", 100, views).index == 1
