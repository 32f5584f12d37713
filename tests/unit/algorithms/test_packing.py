"""Packing: every sample once, no row too full, few and even rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.packing import assign
from slipstream.errors import ConfigError


@given(st.lists(st.integers(1, 100), max_size=200))
def test_every_sample_is_in_exactly_one_row_and_no_row_overflows(lengths):
    rows = assign(lengths, 100)
    assert sorted(i for row in rows for i in row.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 100 for row in rows)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200))
def test_the_number_of_rows_is_near_the_lower_bound(lengths):
    lower_bound = max(-(-sum(lengths) // 100), sum(length > 50 for length in lengths))
    assert len(assign(lengths, 100)) <= 1.5 * lower_bound + 1


def test_short_samples_fill_rows_evenly():
    lengths = np.random.default_rng(0).integers(50, 150, 1000)
    rows = assign(lengths, 4096)
    loads = [lengths[row].sum() for row in rows]
    assert len(rows) == -(-lengths.sum() // 4096)
    assert max(loads) - min(loads) < 150


def test_a_perfect_packing_that_balancing_would_miss_is_kept():
    assert len(assign([3, 3, 2, 2, 2], 6)) == 2


def test_the_result_depends_on_nothing_but_the_lengths():
    lengths = np.random.default_rng(1).integers(1, 500, 300)
    first, second = assign(lengths, 1024), assign(lengths.tolist(), 1024)
    assert [row.tolist() for row in first] == [row.tolist() for row in second]


def test_no_samples_are_no_rows_and_a_sample_longer_than_a_row_is_the_users_mistake():
    assert assign([], 10) == []
    with pytest.raises(ConfigError, match=r"sample 1 has 11 tokens and trainer\.row_tokens = 10"):
        assign([3, 11], 10)
