import numpy as np
import pytest

from slipstream.config.run import FilterConfig
from slipstream.orchestrator.filters import gibberish, group_reason, repetition, rollout_reason, zero_advantage
from tests.unit.orchestrator.made_turns import rollout, turn


@pytest.mark.parametrize(
    ("advantages", "caught"), [([0, 0, 0], True), ([], True), ([1e-12, 0], True), ([0.5, -0.5], False), ([0, 0.01], False)]
)
def test_a_group_without_any_advantage_teaches_nothing(advantages, caught):
    assert zero_advantage(np.array(advantages, np.float32)) is caught
    assert group_reason(FilterConfig(type="zero_advantage"), advantages) == ("zero_advantage" if caught else None)


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8])
def test_a_pattern_that_fills_the_window_is_repetition_wherever_it_stands(period):
    pattern, noise = list(range(period)), list(range(100, 140))
    for length, caught in ((32, True), (31, False)):
        run = (pattern * 32)[:length]
        for tokens in (run, [*run, *noise], [*noise, *run], [*noise, *run, *noise]):
            assert repetition(np.array(tokens, np.int32), window=32) is caught


def test_text_that_repeats_itself_a_few_times_is_not_repetition():
    phrase = list(range(12))
    assert not repetition(np.array(phrase * 3, np.int32), window=32)
    assert not repetition(np.random.default_rng(0).integers(0, 50, 5000), window=32)


@pytest.mark.parametrize("length", [0, 1, 2, 31])
def test_a_reply_shorter_than_the_window_is_never_repetition(length):
    assert not repetition(np.zeros(length, np.int32), window=32)


def test_the_smallest_window_catches_a_doubled_token():
    assert repetition(np.array([1, 5, 5], np.int32), window=2)
    assert not repetition(np.array([1, 5, 6], np.int32), window=2)


def test_gibberish_goes_by_the_mean_and_an_empty_reply_is_none():
    assert gibberish(np.array([-20, -5], np.float32), -12)
    assert not gibberish(np.array([-20, -2], np.float32), -12)
    assert not gibberish(np.zeros(0, np.float32), -12)


def test_each_filter_looks_at_what_it_is_for():
    stuck = rollout(turn([1], [2, 3]), turn([1, 2, 3, 4], [7] * 40, logprobs=[-30.0] * 40))
    fine = rollout(turn([1], [2, 3]))
    assert rollout_reason(FilterConfig(type="repetition"), stuck) == "repetition"
    assert rollout_reason(FilterConfig(type="repetition", window=64), stuck) is None
    assert rollout_reason(FilterConfig(type="gibberish"), stuck) == "gibberish"
    assert rollout_reason(FilterConfig(type="gibberish", min_logprob=-50), stuck) is None
    assert rollout_reason(FilterConfig(type="zero_advantage"), stuck) is None
    assert group_reason(FilterConfig(type="repetition"), [0.0]) is None
    for type_ in ("repetition", "gibberish"):
        assert rollout_reason(FilterConfig(type=type_), fine) is None
        assert rollout_reason(FilterConfig(type=type_), rollout()) is None


def test_a_repetition_across_a_turn_of_the_environment_does_not_count():
    half = [7] * 20
    assert rollout_reason(FilterConfig(type="repetition"), rollout(turn([1], half), turn([1, *half, 2], half))) is None
