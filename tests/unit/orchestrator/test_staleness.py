import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.run import BySamples, ByTokens
from slipstream.errors import StateError
from slipstream.orchestrator.pack import make_batch
from slipstream.orchestrator.staleness import as_ready, check_lag, cut, oldest_version, room, sweep
from tests.unit.orchestrator.make import ready, rollout, sample


def test_the_oldest_version_of_a_step_is_its_own_minus_the_allowed_lag():
    assert oldest_version(step=5, max_lag=0) == 4
    assert oldest_version(step=5, max_lag=3) == 1


@given(st.lists(st.integers(0, 10), max_size=20), st.integers(1, 12), st.integers(0, 3))
def test_a_sweep_keeps_exactly_what_the_step_may_train(versions, step, max_lag):
    items = [ready(f"r{i}", [-1, v]) for i, v in enumerate(versions)]
    kept, stale = sweep(items, step, max_lag, mask=False)
    assert {i.rollout_id for i in kept} == {f"r{i}" for i, v in enumerate(versions) if step - 1 - v <= max_lag}
    assert len(kept) + len(stale) == len(items)


def test_masking_keeps_the_fresh_tokens_of_a_rollout():
    (kept,), stale = sweep([ready("r", [-1, 1, 1, 4])], step=5, max_lag=1, mask=True)
    assert kept.samples[0].loss_mask_T.tolist() == [False, False, False, True]
    assert kept.version_min == 4
    assert stale == []


def test_masking_drops_a_rollout_without_fresh_tokens():
    kept, stale = sweep([ready("r", [-1, 1, 1])], step=5, max_lag=1, mask=True)
    assert (kept, len(stale)) == ([], 1)


def test_the_oldest_version_goes_first_and_then_what_was_ready_first():
    items = [ready("a", [-1, 2]), ready("b", [-1, 1]), ready("c", [-1, 2]), ready("d", [-1, 1])]
    taken, left = cut(items, BySamples(samples=3))
    assert [i.rollout_id for i in taken] == ["b", "d", "a"]
    assert [i.rollout_id for i in left] == ["c"]


def test_there_is_no_batch_before_there_is_enough():
    assert cut([ready("a", [-1, 0])], BySamples(samples=2)) is None
    assert cut([ready("a", [-1, 0, 0])], ByTokens(tokens=4)) is None


@given(st.lists(st.integers(2, 9), min_size=1, max_size=30), st.integers(1, 60))
def test_a_token_batch_is_closed_by_the_sample_that_fills_it(lengths, tokens):
    items = [ready(f"r{i}", [-1] + [0] * (n - 1)) for i, n in enumerate(lengths)]
    found = cut(items, ByTokens(tokens=tokens))
    if found is None:
        assert sum(lengths) < tokens
    else:
        taken, left = found
        sizes = [i.samples[0].num_tokens for i in taken]
        assert sum(sizes) >= tokens > sum(sizes[:-1])
        assert taken + left == items


def test_synchronous_training_has_room_for_one_batch_per_version():
    batch = BySamples(samples=8)
    assert room(live=0, step=1, max_lag=0, batch=batch, outstanding=0) == 8
    assert room(live=0, step=2, max_lag=0, batch=batch, outstanding=0) == 0
    assert room(live=1, step=2, max_lag=0, batch=batch, outstanding=3) == 5


@given(st.integers(0, 9), st.integers(0, 4), st.integers(1, 9), st.integers(0, 50))
def test_room_is_the_rule_on_everything_issued_and_not_dropped(live, max_lag, size, outstanding):
    for step in range(1, live + max_lag + 2):
        issued = (step - 1) * size + outstanding
        assert room(live, step, max_lag, BySamples(samples=size), outstanding) == (live + max_lag + 1) * size - issued


def test_a_rollout_without_a_sampled_token_cannot_be_trained():
    assert as_ready("env", rollout(versions=()), 1.0) is None
    assert as_ready("env", rollout(versions=((2, 1), (3, 2))), 1.0).version_min == 2


def test_a_batch_is_refused_when_a_token_is_too_old_or_from_the_future():
    batch = make_batch(5, [sample([-1, 2, 4, 4])], 64, {})
    assert check_lag(batch, max_lag=2) == {0: 2, 2: 1}
    with pytest.raises(StateError, match="lag"):
        check_lag(batch, max_lag=1)
    with pytest.raises(StateError, match="lag"):
        check_lag(make_batch(5, [sample([-1, 5])], 64, {}), max_lag=9)


def test_versions_of_tokens_without_loss_do_not_count():
    one = sample([-1, 0, 4])
    one.loss_mask_T[1] = False
    assert check_lag(make_batch(5, [one], 64, {}), max_lag=0) == {0: 1}
    assert np.array_equal(one.versions_T, [-1, 0, 4])
