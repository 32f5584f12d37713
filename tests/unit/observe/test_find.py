"""`slipstream rollouts`: filters work together, and one that nothing can fit says so."""

import re

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.errors import ConfigError
from slipstream.observe.find import MEANINGS, find_transcripts
from slipstream.types import Outcome

from .synthetic import ENV, make_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    return make_run(tmp_path / "run", monkeypatch, steps=3)


def names(run, limit=99, **filters):
    return [re.search(r"rollout (\S+)", text)[1] for text in find_transcripts(run, limit=limit, **filters)]


def test_all_filters_together(run):
    fits = {"env": ENV, "outcome": "completed", "min_reward": 0.5, "max_reward": 1.0, "version": 1, "step": 2, "grep": "answer is 4."}
    assert names(run, **fits) == ["r2-0"]
    others = {"env": None, "outcome": "cut", "min_reward": 1.5, "max_reward": 0.75, "version": 0, "step": 1, "grep": "guess"}
    for name in ("version", "step", "grep"):
        assert names(run, **{**fits, name: others[name]}) == [], name
    assert names(run, **{**fits, "max_reward": 0.75}) == []
    assert names(run, **{**fits, "min_reward": 1.0}) == ["r2-0"]


def test_evaluations_are_read_with_the_same_filters(run):
    assert names(run, evals=True) == ["e0", "e1"]
    assert names(run, evals=True, newest=True) == ["e1", "e0"]
    assert names(run, evals=True, max_reward=0, env=ENV, outcome="completed", grep="I guess") == ["e0"]
    assert names(run, evals=True, step=3) == ["e1"]


def test_grep_finds_in_what_is_printed_and_the_limit_counts_what_was_found(run):
    assert names(run, grep="No idea") == ["r1-1", "r2-1", "r3-1"]
    assert names(run, grep="not trained: cut", limit=2) == ["c1", "c2"]


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"outcome": "complete"}, r"did you mean 'completed'\?"),
        ({"outcome": "typo"}, "past its deadline"),
        ({"env": "calc"}, "it has calculator"),
        ({"min_reward": 1.0, "max_reward": 0.5}, "no reward is within"),
        ({"outcome": "cut", "max_reward": 0.0}, "rollouts that end as cut have no reward"),
        ({"grep": "("}, "not a regular expression"),
    ],
)
def test_a_filter_that_nothing_can_fit_is_refused_with_what_would(run, filters, said):
    with pytest.raises(ConfigError, match=said):
        find_transcripts(run, **filters)


def test_every_outcome_is_explained():
    assert set(MEANINGS) == set(Outcome)


def test_who_finds_nothing_is_told_what_there_is(run, tmp_path, monkeypatch):
    result = CliRunner().invoke(app, ["rollouts", str(run), "--step", "9"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "the rollouts of steps 1 to 3 and the evaluations (--eval) of versions 0, 3" in result.stderr
    bare = make_run(tmp_path / "bare", monkeypatch, rollouts=False)
    assert "stored no rollouts yet" in CliRunner().invoke(app, ["rollouts", str(bare)]).stderr
