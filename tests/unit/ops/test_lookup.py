"""Prompt lookup: the longest earlier match, of several the newest, and what followed it."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.ops.lookup import LONGEST, PLACES, LookupIndex


def index_of(tokens, native=True, gram=2, room=20):
    """An index over one slot that knows `tokens` and has `room` for more."""
    row = np.full((1, len(tokens) + room), -1, np.int32)
    row[0, : len(tokens)] = tokens
    return LookupIndex(row, np.array([len(tokens)], np.int32), np.array([row.shape[1]], np.int32), gram, native)


def guess(tokens, most=3, **options):
    """(length of the match, guessed tokens)."""
    index = index_of(tokens, **options)
    found = int(index.guess(np.array([0]), most)[0])
    return found, [token for token in index.tokens_RT[0, len(tokens) :].tolist() if token >= 0]


@pytest.fixture(params=[True, False], ids=["native", "reference"])
def native(request):
    return request.param


def test_what_followed_the_match_is_guessed(native):
    assert guess([1, 2, 3, 4, 5, 9, 1, 2], native=native) == (2, [3, 4, 5])


def test_the_longest_match_wins_and_of_equals_the_newest(native):
    assert guess([1, 2, 3, 4, 0, 2, 3, 5, 0, 1, 2, 3], native=native) == (3, [4, 0, 2])
    assert guess([2, 3, 4, 0, 2, 3, 5, 1, 2, 3], native=native, most=1) == (2, [5])


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5, 2], [7, 7]])
def test_without_a_match_nothing_is_written(tokens, native):
    assert guess(tokens, native=native) == (0, [])


def test_a_match_that_runs_into_the_end_repeats_itself(native):
    assert guess([5, 1, 2, 1, 2], native=native, most=5) == (2, [1, 2, 1, 2, 1])
    assert guess([8, 8, 8], native=native) == (2, [8, 8, 8])


def test_no_guess_lies_beyond_the_limit(native):
    assert guess([1, 2, 3, 4, 5, 9, 1, 2], native=native, room=2) == (2, [3, 4])
    assert guess([1, 2, 3, 4, 5, 9, 1, 2], native=native, room=0) == (2, [])


def test_a_slot_that_was_cleared_knows_nothing_of_the_sequence_before(native):
    index = index_of([1, 2, 3, 1, 2], native)
    assert index.guess(np.array([0]), 1)[0] == 2
    index.clear(0)
    index.tokens_RT[0], index.known_R[0] = 0, 3
    index.tokens_RT[0, :3] = [9, 1, 2]
    assert index.guess(np.array([0]), 1)[0] == 0


def best_match(known_T, gram):
    """Straight from the definition: (length of the longest match, where it ends); among equals the newest."""
    last, best, end = len(known_T), 0, 0
    for place in range(1, last):
        same = 0
        while same < min(LONGEST, place) and known_T[place - 1 - same] == known_T[last - 1 - same]:
            same += 1
        if same >= max(best, gram):
            best, end = same, place
    return best, end


@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_an_index_that_grows_step_by_step_finds_what_a_scan_finds(vocab):
    rng = np.random.default_rng(vocab)
    truth_RT = rng.integers(0, vocab, (3, 300)).astype(np.int32)
    known_R, limit_R = np.array([1, 5, 40], np.int32), np.full(3, 300, np.int32)
    indices = [LookupIndex(truth_RT.copy(), known_R, limit_R, 2, native) for native in (True, False)]
    slots_S = np.array([2, 0, 1])
    while known_R.max() < 280:
        found = [index.guess(slots_S, 6) for index in indices]
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(indices[0].tokens_RT, indices[1].tokens_RT)
        for slot, length in zip(slots_S, found[0], strict=True):
            known = int(known_R[slot])
            best, end = best_match(truth_RT[slot, :known].tolist(), 2)
            if vocab == 30:  # few places: all of them are compared
                assert known / vocab**2 < PLACES and length == best
            assert length <= best and (length > 0) == (best > 0)
            if length == best and best and vocab == 30:
                assert indices[0].tokens_RT[slot, known] == truth_RT[slot, end]
        for index in indices:
            index.tokens_RT[:] = truth_RT
        known_R += rng.integers(1, 5, 3).astype(np.int32)
