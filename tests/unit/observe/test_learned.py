"""What a run learned, on evaluations small enough to count by hand."""

from dataclasses import replace

import pytest

from slipstream.observe.learned import what_it_learned
from slipstream.observe.rollouts import RolloutWriter
from slipstream.types import Outcome, Task

from .synthetic import rollout


def played(env, index, reward, version, sample=0, parts=None, text=""):
    made = rollout(f"{env}-{version}-{index}-{sample}", reward, text or f"answer {index} of version {version}", version)
    outcome = Outcome.cut if reward is None else Outcome.completed
    return replace(made, task=Task(f"{env}/eval/{index}", env, index), outcome=outcome, reward_parts=parts or {})


def write(folder, version, *rollouts):
    RolloutWriter(folder).write_eval(version, rollouts)


def test_nothing_is_known_before_the_second_evaluation(tmp_path):
    assert what_it_learned(tmp_path) == []
    write(tmp_path, 0, played("a", 0, 1.0, 0))
    assert what_it_learned(tmp_path) == []


def test_the_first_and_the_last_evaluation_count_and_every_environment_has_its_own(tmp_path):
    write(tmp_path, 0, played("a", 0, 0.0, 0), played("b", 0, 1.0, 0))
    write(tmp_path, 5, played("a", 0, 0.3, 5), played("b", 0, 0.3, 5))
    write(tmp_path, 9, played("a", 0, 1.0, 9), played("b", 0, 0.5, 9))
    a, b = what_it_learned(tmp_path)
    assert (a.env, a.version_before, a.version_after, a.better, a.worse, a.equal) == ("a", 0, 9, 1, 0, 0)
    assert (b.env, b.better, b.worse, b.rows[0].change) == ("b", 0, 1, -0.5)


def test_a_component_is_averaged_over_the_rollouts_that_have_it(tmp_path):
    write(tmp_path, 0, played("a", 0, 0.5, 0, parts={"bullets": 0.0, "no_commas": 1.0}), played("a", 1, 1.0, 0, parts={"no_commas": 1.0}))
    write(tmp_path, 3, played("a", 0, 1.0, 3, parts={"bullets": 1.0, "no_commas": 1.0}), played("a", 1, 0.0, 3, parts={"no_commas": 0.0}))
    [learned] = what_it_learned(tmp_path)
    rows = {row.name: (row.before, row.after, row.num_before, row.num_after) for row in learned.rows}
    assert list(rows)[:3] == ["reward", "bullets", "no_commas"]
    assert rows["reward"] == (0.75, 0.5, 2, 2)
    assert rows["bullets"] == (0.0, 1.0, 1, 1)
    assert rows["no_commas"] == (1.0, 0.5, 2, 2)
    assert rows["turns"] == (2, 2, 2, 2) and rows["sampled tokens"] == (5, 5, 2, 2)


def test_a_rollout_without_a_grade_is_in_no_average(tmp_path):
    write(tmp_path, 0, played("a", 0, 0.0, 0), played("a", 1, None, 0, parts={"x": 1.0}))
    write(tmp_path, 3, played("a", 0, 1.0, 3), played("a", 1, 1.0, 3, parts={"x": 1.0}))
    [learned] = what_it_learned(tmp_path)
    assert learned.better + learned.worse + learned.equal == 1
    assert [(row.before, row.after, row.change) for row in learned.rows if row.name == "x"] == [(None, 1.0, None)]


def test_several_samples_of_a_task_count_by_their_mean(tmp_path):
    write(tmp_path, 0, played("a", 0, 0.0, 0, 0), played("a", 0, 1.0, 0, 1))
    write(tmp_path, 3, played("a", 0, 1.0, 3, 0), played("a", 0, 0.0, 3, 1))
    [learned] = what_it_learned(tmp_path)
    assert (learned.better, learned.worse, learned.equal) == (0, 0, 1)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ([0, 0, 0, 0, 1], [1, 0.5, 0.25, 0, 0], [("largest gain", 0), ("middle", 2), ("largest loss", 4)]),
        ([0, 0, 0], [1, 1, 1], [("largest gain", 0), ("middle", 1)]),
        ([0, 0], [0, 0], [("middle", 1)]),
        ([1], [0], [("largest loss", 0)]),
    ],
    ids=["all kinds", "only gains", "nothing changed", "only a loss"],
)
def test_the_largest_gain_the_middle_and_the_largest_loss_are_shown(tmp_path, before, after, shown):
    write(tmp_path, 0, *(played("a", i, float(r), 0) for i, r in enumerate(before)))
    write(tmp_path, 4, *(played("a", i, float(r), 4) for i, r in enumerate(after)))
    [learned] = what_it_learned(tmp_path)
    assert [pair.title for pair in learned.pairs] == [f"{label}: a/eval/{index}" for label, index in shown]


def test_a_pair_has_the_prompt_once_and_what_each_version_said_with_its_score(tmp_path):
    write(tmp_path, 0, played("a", 0, 0.0, 0, parts={"correct": 0.0}, text="I guess 7"))
    write(tmp_path, 4, played("a", 0, 1.0, 4, parts={"correct": 1.0}, text="49 \x1b[31m"))
    [[pair]] = [learned.pairs for learned in what_it_learned(tmp_path)]
    assert pair.prompt == "--- user\nWhat is 7 times 7? <b>&</b>"
    assert pair.before == "before: policy version 0, reward 0.000 (correct 0)"
    assert pair.before_text == '--- assistant\n[calls calc({"a": 7})]\n--- tool call_1\n49\n--- assistant\nI guess 7'
    assert pair.after == "after: policy version 4, reward 1.000 (correct 1)"
    assert pair.after_text.endswith("--- assistant\n49 \\x1b[31m")
