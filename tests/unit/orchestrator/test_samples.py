import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.orchestrator.pack import pack
from slipstream.orchestrator.samples import mask_stale, rollout_samples
from tests.unit.orchestrator.made_turns import ids, rollout, rows, sample, turn


def test_turns_that_extend_one_another_become_one_sample_with_the_environment_masked():
    (only,) = rollout_samples(rollout(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])), advantage=0.5)
    assert only.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert only.loss_mask_T.tolist() == [False, False, True, True, False, True]
    assert only.logprobs_T.tolist() == [0, 0, -1, -2, 0, -1]
    assert only.versions_T.tolist() == [-1, -1, 0, 0, -1, 0]
    assert (only.rollout_id, only.group_id, only.env, only.advantage, only.reward) == ("r", "g", "e", 0.5, 1.0)


def test_a_turn_that_does_not_extend_starts_a_new_sample():
    first, second = rollout_samples(rollout(turn([1, 2], [3, 4]), turn([1, 2, 3, 9], [6]), turn([1, 2, 3, 9, 6, 7], [8])), 1.0)
    assert first.tokens_T.tolist() == [1, 2, 3, 4]
    assert second.tokens_T.tolist() == [1, 2, 3, 9, 6, 7, 8]
    assert second.loss_mask_T.tolist() == [False] * 4 + [True, False, True]


def test_branches_that_are_interleaved_each_become_a_sample_and_every_sampled_token_is_trained_once():
    left, right = [turn([1], [2]), turn([1, 2, 3], [4])], [turn([9], [8]), turn([9, 8, 3], [5]), turn([9, 8, 3, 5, 6], [7])]
    retry = turn([1, 2, 6], [5])
    samples = rollout_samples(rollout(left[0], right[0], left[1], right[1], retry, right[2]), 1.0)
    assert [s.tokens_T.tolist() for s in samples] == [[1, 2, 3, 4], [9, 8, 3, 5, 6, 7], [1, 2, 6, 5]]
    assert [s.loss_mask_T.nonzero()[0].tolist() for s in samples] == [[1, 3], [1, 3, 5], [3]]


def test_a_turn_goes_on_from_the_longest_tokens_that_it_extends():
    short, long, after = turn([1], []), turn([1, 2], [3]), turn([1, 2, 3, 4], [5])
    assert [s.tokens_T.tolist() for s in rollout_samples(rollout(long, short, after), 1.0)] == [[1, 2, 3, 4, 5]]


def test_a_change_of_temperature_starts_a_new_sample_and_greedy_counts_as_untempered():
    first, second = rollout_samples(rollout(turn([1], [2], temperature=0.0), turn([1, 2, 3], [4], temperature=0.7)), 1.0)
    assert (first.temperature, second.temperature) == (1.0, 0.7)


def test_versions_are_stamped_token_by_token():
    segmented = turn([1], [2, 3, 4, 5], versions=((3, 1), (4, 0), (5, 3)))
    (only,) = rollout_samples(rollout(segmented, turn([1, 2, 3, 4, 5, 6], [7], versions=((6, 1),))), 1.0)
    assert only.versions_T.tolist() == [-1, 3, 5, 5, 5, -1, 6]


def test_nothing_is_ever_trained_at_position_zero():
    (only,) = rollout_samples(rollout(turn([], [2, 3])), 1.0)
    assert only.loss_mask_T.tolist() == [False, True]


def test_turns_without_a_token_give_no_sample_and_do_not_break_the_others():
    assert rollout_samples(rollout(), 1.0) == ()
    assert rollout_samples(rollout(turn([1, 2], [])), 1.0) == ()
    (only,) = rollout_samples(rollout(turn([1, 2], []), turn([1, 2, 3], [4])), 1.0)
    assert only.tokens_T.tolist() == [1, 2, 3, 4]
    assert only.loss_mask_T.tolist() == [False, False, False, True]


def test_the_last_sampled_token_gets_its_routing_row_from_the_next_turn():
    first = turn([1, 2], [3, 4], routing=rows(0, 3))
    second = turn([1, 2, 3, 4, 5], [6, 7], routing=rows(3, 6))
    _, known_alone_T = packed(first)
    ids_TLK, known_T = packed(first, second)
    assert known_alone_T.tolist() == [True, True, True, False]
    assert known_T.tolist() == [True] * 6 + [False]
    assert ids_TLK[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert ids_TLK.dtype == np.uint8


def test_an_earlier_row_stays_and_a_later_turn_fills_what_was_unknown():
    first = turn([1, 2], [3, 4], routing=rows(0, 3, invalid=[1]))
    second = turn([1, 2, 3, 4, 5], [6], routing=rows(0, 5, fill=100))
    ids_TLK, known_T = packed(first, second)
    assert ids_TLK[:, 1, 1].tolist() == [0, 101, 2, 103, 104, 0]
    assert known_T.tolist() == [True] * 5 + [False]


def test_rows_beyond_the_sample_are_left_out():
    ids_TLK, known_T = packed(turn([1, 2], [3], routing=rows(0, 9)))
    assert known_T.tolist() == [True] * 3
    assert ids_TLK[:, 0, 0].tolist() == [0, 1, 2]


def test_a_turn_without_routing_leaves_its_rows_unknown_and_a_dense_model_has_none():
    first, second = turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], routing=rows(3, 5))
    _, known_T = packed(first, second)
    assert known_T.tolist() == [False, False, False, True, True, False]
    assert packed(first) == (None, None)


def packed(*turns):
    """Routing rows of the one row that these turns make."""
    (row,) = pack(rollout_samples(rollout(*turns), 1.0), 64)
    return row.routing_TLK, row.routing_valid_T


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=6))
def test_every_sampled_token_is_trained_exactly_once(plan):
    turns, so_far, counter = [], [], 0
    for num_env, num_sampled, edited in plan:
        prompt = ([] if edited else so_far) + [counter + i for i in range(num_env + 1)]
        counter += num_env + 1
        tokens = [counter + i for i in range(num_sampled)]
        counter += num_sampled
        turns.append(turn(prompt, tokens))
        so_far = prompt + tokens
    samples = rollout_samples(rollout(*turns), 1.0)
    trained = [token for s in samples for token in s.tokens_T[s.loss_mask_T].tolist()]
    assert sorted(trained) == sorted(token for t in turns for token in t.completion.tokens_N.tolist())
    assert all((s.versions_T >= 0).tolist() == s.loss_mask_T.tolist() for s in samples)


@pytest.mark.parametrize(("version", "max_lag", "kept"), [(5, 2, [3, 4, 5]), (5, 0, [5]), (9, 2, []), (5, 9, [1, 3, 4, 5])])
def test_tokens_beyond_the_lag_are_masked_and_nothing_else_changes(version, max_lag, kept):
    (before,) = rollout_samples(rollout(turn([7], [1, 3, 4, 5], versions=((1, 1), (3, 1), (4, 1), (5, 1)))), 1.0)
    after = mask_stale(before, version, max_lag)
    assert after.versions_T[after.loss_mask_T].tolist() == kept
    assert after.tokens_T is before.tokens_T
    assert before.loss_mask_T.sum() == 4


def test_a_fresh_sample_is_returned_as_it_is():
    fresh = sample(5)
    assert mask_stale(fresh, 3, 3) is fresh


def test_samples_use_the_types_of_the_wire():
    (only,) = rollout_samples(rollout(turn([1], [2])), 1.0)
    types = [a.dtype for a in (only.tokens_T, only.loss_mask_T, only.logprobs_T, only.versions_T)]
    assert types == [np.int32, np.bool_, np.float32, np.int32]
    assert ids(1).dtype == np.int32
