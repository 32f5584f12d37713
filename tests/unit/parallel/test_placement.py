"""Every expert has a place, hot ones have several, all ranks have about as much to do, and little moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.parallel.placement import Placement, better, imbalance, place, slots_per_rank


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 8))
    experts = draw(st.integers(ranks, 40))
    redundant = draw(st.integers(0, experts - slots_per_rank(experts, ranks, 0)))
    load_LE = draw(st.lists(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts), min_size=1, max_size=3))
    return np.array(load_LE), ranks, slots_per_rank(experts, ranks, redundant)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_expert_has_a_place_and_no_slot_is_empty(case):
    load_LE, ranks, slots = case
    found = place(load_LE, ranks, slots)
    assert found.experts_LRS.shape == (len(load_LE), ranks, slots)
    copies_LE = found.copies(load_LE.shape[1])
    assert copies_LE.min() >= 1 and (copies_LE.sum(1) == ranks * slots).all() and copies_LE.max() <= ranks
    np.testing.assert_allclose(found.rank_load(load_LE).sum(1), load_LE.sum(1))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_slots_of_an_expert_are_those_that_hold_it(case):
    load_LE, ranks, slots = case
    found, experts = place(load_LE, ranks, slots), load_LE.shape[1]
    table_LEC, copies_LE = found.slots(experts), found.copies(experts)
    for layer in range(len(load_LE)):
        flat = found.experts_LRS[layer].ravel()
        for expert in range(experts):
            own = table_LEC[layer, expert, : copies_LE[layer, expert]]
            assert (flat[own] == expert).all() and len(set(own.tolist())) == copies_LE[layer, expert]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_same_load_moves_nothing_and_is_no_reason_to(case):
    load_LE, ranks, slots = case
    found = place(load_LE, ranks, slots)
    again = place(load_LE, ranks, slots, found)
    assert (np.sort(again.experts_LRS, 2) == np.sort(found.experts_LRS, 2)).all() or imbalance(again.rank_load(load_LE)) == pytest.approx(
        imbalance(found.rank_load(load_LE))
    )
    assert better(load_LE, found, 0.0) is None


def test_without_load_each_rank_gets_an_even_share_and_spare_places_other_experts():
    found = place(np.zeros((1, 6)), ranks=3, slots=3)
    assert found.copies(6).tolist() == [[2, 2, 2, 1, 1, 1]]
    assert all(len(set(experts)) == 3 for experts in found.experts_LRS[0].tolist())


def test_the_hottest_expert_is_copied_first_and_the_load_packed_evenly():
    load_LE = np.array([[90, 10, 10, 10]])
    assert imbalance(place(load_LE, 2, 2).rank_load(load_LE)) == pytest.approx(100 / 60), "without a spare place 90 cannot be split"
    found = place(load_LE, 2, 3)
    assert found.copies(4).tolist()[0][0] == 2
    assert imbalance(found.rank_load(load_LE)) < 1.01


def test_packing_follows_the_published_example():
    """The example of the balancer's README (deepseek-ai/EPLB) has 12 experts a layer and 16 places on 8 ranks. Of its first layer the four
    hottest are copied: expert 1 has 132, 5 has 176, 10 has 165 and 11 has 104."""
    load_LE = np.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]])
    found = place(load_LE, 8, 2)
    assert np.flatnonzero(found.copies(12)[0] == 2).tolist() == [1, 4, 5, 10]
    assert np.flatnonzero(found.copies(12)[1] == 2).tolist() == [5, 6, 7, 8]
    assert imbalance(found.rank_load(load_LE)) < 1.2 < imbalance(place(np.ones((2, 12)), 8, 2).rank_load(load_LE))


def test_only_what_has_to_move_moves():
    load_LE = np.random.default_rng(0).integers(50, 60, (1, 32))
    before = place(load_LE, 8, 5)
    changed = load_LE.copy()
    changed[0, 3] = 400
    after = better(changed, before, 0.1)
    assert after is not None
    fresh = place(changed, 8, 5)
    moved, without = ((p.experts_LRS != before.experts_LRS).mean() for p in (after, fresh))
    assert moved < without


def test_a_gain_that_is_too_small_moves_nothing():
    now = Placement(np.array([[[0, 1], [2, 3]]]))
    load_LE = np.array([[30, 30, 20, 30]])
    assert imbalance(now.rank_load(load_LE)) == pytest.approx(60 / 55)
    assert better(load_LE, now, 0.1) is None
    assert better(np.array([[60, 60, 20, 20]]), now, 0.1) is not None


def test_a_noisy_load_does_not_keep_experts_moving():
    """The same router, 400 tokens a look: the first look may move experts, the others have no reason to."""
    rng, shares_E = np.random.default_rng(0), np.random.default_rng(1).dirichlet(np.full(16, 0.5))
    now, recent_LE, moves = place(np.zeros((1, 16)), 4, 5), np.zeros((1, 16)), 0
    for _ in range(30):
        recent_LE = rng.multinomial(400, shares_E)[None] + recent_LE / 2
        found = better(recent_LE, now, 0.1)
        moves += found is not None
        now = found or now
    assert moves <= 2


def test_imbalance_is_that_of_the_busiest_rank_and_1_without_any_load():
    assert imbalance(np.array([[3, 1], [1, 1]])) == pytest.approx((1.5 + 1) / 2)
    assert imbalance(np.zeros((2, 4))) == 1.0
