"""Closed forms of each advantage estimator, and the edges: equal rewards, one member, missing members."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.advantages import ESTIMATORS, compute
from slipstream.config.train import AdvantageConfig
from slipstream.errors import ConfigError, StateError

TYPES = sorted(ESTIMATORS)
SEQ_LEN = 100


def advantages(rewards, lengths=None, **config):
    lengths = [10] * len(rewards) if lengths is None else lengths
    result = compute(AdvantageConfig(**config), np.asarray(rewards, np.float32), np.asarray(lengths, np.int32), SEQ_LEN)
    assert result.dtype == np.float32
    return result.tolist()


def test_group_mean_subtracts_the_mean():
    assert advantages([1, 0, 0, 0]) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_group_std_divides_by_the_population_spread():
    assert advantages([1, 0, 1, 0], type="group_std") == pytest.approx([1, -1, 1, -1], rel=1e-5)
    spread = math.sqrt(0.75 * 0.25)
    assert advantages([1, 0, 0, 0], type="group_std") == pytest.approx([0.75 / spread] + [-0.25 / spread] * 3, rel=1e-5)


def test_rloo_compares_with_the_mean_of_the_others():
    assert advantages([1, 0, 0.5], type="rloo") == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5], abs=1e-7)


def test_maxrl_divides_by_the_mean_so_that_rare_successes_weigh_more():
    assert advantages([1, 0, 0, 0], type="maxrl") == pytest.approx([3, -1, -1, -1])
    assert advantages([1, 1, 1, 0], type="maxrl") == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])


def test_maxrl_is_zero_when_the_mean_is_not_positive():
    assert advantages([-1, 0, -2], type="maxrl") == [0, 0, 0]
    assert advantages([-1, 1], type="maxrl") == [0, 0]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_zero(kind, reward):
    assert advantages([reward] * 7, type=kind) == [0.0] * 7


@pytest.mark.parametrize("kind", TYPES)
def test_rewards_that_the_penalty_leaves_equal_give_exactly_zero(kind):
    assert advantages([1] * 7, lengths=[37] * 7, type=kind, length_penalty=0.3) == [0.0] * 7


@pytest.mark.parametrize("kind", TYPES)
def test_a_group_of_one_teaches_nothing(kind):
    assert advantages([1], type=kind) == [0]


@pytest.mark.parametrize("kind", TYPES)
def test_an_empty_group_gives_an_empty_array(kind):
    assert advantages([], type=kind) == []


def test_a_partial_group_has_the_baseline_of_the_members_that_it_has():
    # Eight were issued, one failed for infrastructure and is simply not here: the divisor is 7, not 8.
    assert advantages([1, 0, 0, 0, 0, 0, 0]) == pytest.approx([6 / 7] + [-1 / 7] * 6)


def test_length_penalty_grows_with_pass_rate_and_length():
    # pass rate 0.5; penalties 0.2 * 0.5 * (10, 50) / 100 = 0.01, 0.05
    assert advantages([1, 0], lengths=[10, 50], length_penalty=0.2) == pytest.approx([0.52, -0.52])


def test_length_penalty_does_nothing_while_a_task_is_unsolved():
    assert advantages([0, 0, 0], lengths=[1, 50, 100], length_penalty=5) == [0, 0, 0]


def test_length_penalty_breaks_ties_among_solved_rollouts_in_favour_of_short_ones():
    short, long = advantages([1, 1], lengths=[10, 90], length_penalty=0.5)
    assert short == pytest.approx(0.2) and long == pytest.approx(-0.2)


@settings(deadline=None)
@given(rewards=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=16), kind=st.sampled_from(TYPES))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, kind):
    values = np.array(advantages(rewards, type=kind), dtype=np.float64)
    assert abs(values.sum()) <= 1e-5 * max(1.0, np.abs(values).sum())
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(values[order]) >= 0).all()


@settings(deadline=None)
@given(rewards=st.lists(st.integers(0, 100), min_size=2, max_size=16), shift=st.integers(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing_where_the_baseline_is_a_mean(rewards, shift):
    for kind in ("group_mean", "rloo", "group_std"):
        assert advantages(rewards, type=kind) == pytest.approx(advantages([r + shift for r in rewards], type=kind), abs=1e-4)


def doubled(rewards_S, lengths_S, pass_rate):
    return 2 * rewards_S + lengths_S + pass_rate


def too_short(rewards_S, lengths_S, pass_rate):
    return rewards_S[:-1]


def test_a_custom_function_gets_rewards_lengths_and_pass_rate():
    assert advantages([1, 0], lengths=[3, 4], type="custom", path=f"{__name__}:doubled") == [5.5, 4.5]


def test_a_custom_function_that_returns_another_shape_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"too_short.*shape \(1,\); expected \(2,\)"):
        advantages([1, 0], type="custom", path=f"{__name__}:too_short")


def test_a_reward_that_is_not_finite_never_gets_this_far():
    with pytest.raises(StateError, match="not finite"):
        advantages([1, float("nan")])


def test_advantages_import_without_torch():
    code = "import sys; sys.modules['torch'] = None; import slipstream.algorithms.advantages"
    subprocess.run([sys.executable, "-c", code], check=True)
