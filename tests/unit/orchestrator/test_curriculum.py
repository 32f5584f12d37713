import json
from collections import Counter

import numpy as np
import pytest

from slipstream.config.run import CurriculumConfig
from slipstream.orchestrator.curriculum import Curriculum

UNIFORM = CurriculumConfig()
BY_RATE = CurriculumConfig(type="pass_rate", retire_above=0.9, retire_below=0.1, retire_after=2, revisit_every=5, ema=1.0)


def draws(curriculum: Curriculum, count: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [curriculum.next(rng) for _ in range(count)]


def test_uniform_goes_through_every_task_once_an_epoch_in_a_new_order():
    order = draws(Curriculum(UNIFORM, 20, seed=1), 60)
    epochs = [order[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order == draws(Curriculum(UNIFORM, 20, seed=1), 60, seed=9)
    assert order != draws(Curriculum(UNIFORM, 20, seed=2), 60)


def test_pass_rate_draws_in_proportion_to_the_variance_plus_the_floor():
    config = CurriculumConfig(type="pass_rate", floor=0.05, ema=1.0)
    curriculum = Curriculum(config, 3, seed=0)
    for index, rate in enumerate((0.0, 0.5, 0.9)):
        curriculum.update(index, rate)
    weights = np.array([0.05, 0.30, 0.14])
    counts = Counter(draws(curriculum, 20_000))
    shares = np.array([counts[i] for i in range(3)]) / 20_000
    assert np.abs(shares - weights / weights.sum()).max() < 0.015


def test_the_estimate_is_a_moving_average_that_starts_at_the_first_group():
    curriculum = Curriculum(CurriculumConfig(type="pass_rate", ema=0.25), 2, seed=0)
    curriculum.update(0, 1.0)
    assert curriculum.state()["pass_rates"] == [1.0]
    curriculum.update(0, 0.0)
    assert curriculum.state()["pass_rates"] == [0.75]


@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_a_task_beyond_a_bound_for_long_enough_is_retired_and_no_longer_drawn(rate):
    curriculum = Curriculum(BY_RATE, 4, seed=0)
    curriculum.update(2, rate)
    assert curriculum.num_retired == 0
    curriculum.update(2, rate)
    assert curriculum.num_retired == 1
    assert 2 not in draws(curriculum, 300)


def test_one_good_group_in_between_starts_the_count_again():
    curriculum = Curriculum(BY_RATE, 4, seed=0)
    for rate in (1.0, 0.5, 1.0):
        curriculum.update(2, rate)
    assert curriculum.num_retired == 0


def test_a_retired_task_is_tried_again_once_every_so_many_groups_and_stays_while_it_is_beyond_the_bound():
    curriculum = Curriculum(BY_RATE, 10, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(2):
        curriculum.update(7, 1.0)
    tried = 0
    for _ in range(100):
        index = curriculum.next(rng)
        tried += index == 7
        curriculum.update(index, 1.0 if index == 7 else 0.5)
    assert tried == 102 // 5
    assert curriculum.num_retired == 1


@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_retiring_is_reversible(rate):
    curriculum = Curriculum(BY_RATE, 4, seed=0)
    for _ in range(2):
        curriculum.update(2, rate)
    curriculum.update(2, 0.5)
    assert curriculum.num_retired == 0
    assert 2 in draws(curriculum, 100)


def test_retired_tasks_take_turns_at_being_tried_again():
    curriculum = Curriculum(BY_RATE, 6, seed=0)
    rng = np.random.default_rng(0)
    for index in (0, 1, 2):
        for _ in range(2):
            curriculum.update(index, 1.0)
    tried = []
    for _ in range(60):
        index = curriculum.next(rng)
        if index < 3:
            tried.append(index)
        curriculum.update(index, 1.0 if index < 3 else 0.5)
    assert tried[:6] == [0, 1, 2, 0, 1, 2]


def test_when_all_tasks_are_retired_the_one_that_waited_longest_is_drawn():
    curriculum = Curriculum(BY_RATE, 3, seed=0)
    for index in (2, 0, 1):
        for _ in range(2):
            curriculum.update(index, 1.0)
    assert curriculum.num_retired == 3
    assert draws(curriculum, 6) == [2, 0, 1, 2, 0, 1]


def test_the_default_bounds_never_retire():
    curriculum = Curriculum(CurriculumConfig(type="pass_rate"), 2, seed=0)
    for _ in range(20):
        curriculum.update(0, 1.0)
        curriculum.update(1, 0.0)
    assert curriculum.num_retired == 0


@pytest.mark.parametrize("config", [UNIFORM, BY_RATE])
@pytest.mark.parametrize("stop", [0, 1, 17, 40])
def test_resume_from_json_goes_on_with_the_same_draws(config, stop):
    def run(curriculum, rng, count):
        result = []
        for _ in range(count):
            index = curriculum.next(rng)
            result.append(index)
            curriculum.update(index, float(rng.integers(0, 5)) / 4 if index % 3 else 1.0)
        return result

    whole_rng, rng = np.random.default_rng(3), np.random.default_rng(3)
    whole = run(Curriculum(config, 12, seed=5), whole_rng, 120)
    first = Curriculum(config, 12, seed=5)
    start = run(first, rng, stop)
    resumed = Curriculum.from_state(config, 12, 5, json.loads(json.dumps(first.state())))
    assert start + run(resumed, rng, 120 - stop) == whole
    assert resumed.num_retired == len(resumed.state()["retired"])
