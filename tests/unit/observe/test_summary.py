"""Summary numbers of the synthetic run against numbers worked out by hand (see synthetic.py for its timetable)."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from slipstream.observe.history import History, intersect, merge_intervals, total
from slipstream.observe.metrics import FILE, MetricsWriter
from slipstream.observe.summary import print_summary, summarise

from .synthetic import ENV, T0, make_run, trainer_values

ISSUE_KEYS = [
    "steps",
    "wall_s",
    "eval_first",
    "eval_last",
    "samples_trained",
    "rollouts_by_outcome",
    "dropped_by_reason",
    "lag_mean",
    "lag_max",
    "max_off_policy_steps",
    "engine_busy_frac",
    "trainer_busy_frac",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
    "mismatch_kl_mean",
    "versions_published",
    "ledger_balanced",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    return make_run(tmp_path / "run", monkeypatch)


def test_the_numbers_are_those_worked_out_by_hand(run):
    got = summarise(run)
    assert got["steps"] == 5 and got["max_steps"] == 5
    assert got["wall_s"] == pytest.approx(20)
    assert (got["eval_first"], got["eval_last"]) == (pytest.approx(0.25), pytest.approx(0.75))
    assert got["samples_trained"] == 5 * 8
    assert got["rollouts_by_outcome"] == {"completed": 5 * 8 + 1 + 1, "cut": 5}
    assert got["dropped_by_reason"] == {"cut": 5, "zero_advantage": 1}
    assert got["rollouts_issued"] == 40 + 5 + 1 + 2 + 1
    assert got["ledger_balanced"] is True
    assert (got["lag_mean"], got["lag_max"], got["max_off_policy_steps"]) == (pytest.approx(0.4), 2, 2)
    assert got["mismatch_kl_mean"] == pytest.approx(0.003)
    assert got["versions_published"] == 5
    # The window is from second 1 (first step) to second 19.5 (last publish).
    assert got["window_s"] == pytest.approx(18.5)
    assert got["trainer_busy_frac"] == pytest.approx(5 * 2.5 / 18.5)
    assert got["engine_busy_frac"] == pytest.approx((4 * 3 + 2) / 18.5)
    assert got["overlap_frac"] == pytest.approx(5 * 2 / 12.5)
    assert got["generated_tokens_per_s"] == pytest.approx(250)
    assert got["trained_tokens_per_s"] == pytest.approx(5 * 800 / 18.5)


def test_every_key_of_the_promise_is_there_and_the_summary_is_json(run):
    got = json.loads(json.dumps(summarise(run), allow_nan=False))
    assert set(ISSUE_KEYS) <= set(got)


def test_an_empty_folder_has_a_summary_too(tmp_path):
    got = summarise(tmp_path)
    assert set(ISSUE_KEYS) <= set(got)
    assert (got["steps"], got["samples_trained"], got["ledger_balanced"], got["engine_busy_frac"]) == (0, 0, None, None)
    json.dumps(got, allow_nan=False)


def test_without_a_ledger_the_counts_come_from_the_metrics(tmp_path, monkeypatch):
    got = summarise(make_run(tmp_path / "run", monkeypatch, ledger=False))
    assert got["rollouts_by_outcome"] == {"completed": 45, "cut": 5}
    assert got["dropped_by_reason"] == {"cut": 5}
    assert got["ledger_balanced"] is None


def test_steps_trained_again_after_a_resume_count_once(run):
    before = summarise(run)
    writer = MetricsWriter(run, "trainer")
    writer.log(5, trainer_values(5))
    after = summarise(run)
    assert after["samples_trained"] == before["samples_trained"]
    assert after["steps"] == 5


def test_a_torn_last_line_changes_nothing(run):
    before = summarise(run)
    with (run / FILE).open("ab") as file:
        file.write(b'{"kind":"metrics","role":"trainer","time":99999999999,"st')
    assert summarise(run) == before


def test_lag_and_mismatch_are_weighted_by_loss_tokens(tmp_path):
    writer = MetricsWriter(tmp_path, "trainer")
    writer.log(1, {"trainer/tokens/loss": 100, "trainer/lag/mean": 1.0, "trainer/mismatch_kl/mean": 0.1})
    writer.log(2, {"trainer/tokens/loss": 300, "trainer/lag/mean": 2.0, "trainer/mismatch_kl/mean": 0.2})
    writer.log(3, {"trainer/tokens/loss": 300, "trainer/lag/mean": float("nan"), "trainer/mismatch_kl/mean": float("nan")})
    got = summarise(tmp_path)
    assert got["lag_mean"] == pytest.approx(1.75)
    assert got["mismatch_kl_mean"] == pytest.approx(0.175)


def test_two_replicas_share_the_busy_fraction_and_add_their_tokens(run):
    before = summarise(run)
    second = MetricsWriter(run, "engine-1")
    second.span("busy", T0 + 1, T0 + 19.5)
    got = summarise(run)
    assert got["engine_busy_frac"] == pytest.approx((before["engine_busy_frac"] + 1) / 2)
    assert got["generated_tokens_per_s"] == pytest.approx(250)
    assert got["overlap_frac"] == pytest.approx(1)


def test_an_engine_restart_does_not_make_tokens_negative(tmp_path):
    writer = MetricsWriter(tmp_path, "engine-0")
    for value in (0, 100, 250, 30, 80):
        writer.log(-1, {"engine/tokens/generated": value})
    history = History(tmp_path)
    history.poll()
    _, values = history.counter("engine-0", "engine/tokens/generated")
    assert values.tolist() == [0, 100, 250, 280, 330]


def test_a_repeated_evaluation_of_one_version_replaces_the_earlier_one(tmp_path):
    writer = MetricsWriter(tmp_path, "orchestrator")
    for version, env, score in ((0, "a", 0.1), (0, "b", 0.3), (0, "a", 0.2), (4, "a", 0.9), (4, "b", 0.7)):
        writer.event("eval", version=version, env=env, avg_at_k=score, pass_at_k=score, reward_mean=score, samples=1)
    got = summarise(tmp_path)
    assert got["eval_first"] == pytest.approx(0.25)
    assert got["eval_last"] == pytest.approx(0.8)


def test_the_table_shows_the_evaluation_before_and_after(run):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(summarise(run), console)
    console.file.close()
    text = console.export_text()
    for part in (ENV, "before", "after", "0.25", "0.75", "ledger balanced", "yes", "not trained: cut", "5 of 5", "80%"):
        assert part in text


def test_with_one_evaluation_there_is_no_after(tmp_path, capsys):
    writer = MetricsWriter(tmp_path, "orchestrator")
    writer.event("eval", version=0, env="a", avg_at_k=0.1, pass_at_k=0.1, reward_mean=0.1, samples=1)
    print_summary(summarise(tmp_path))
    text = capsys.readouterr().out
    assert "before" in text and "after" not in text


def test_the_table_of_an_empty_folder_prints(tmp_path, capsys):
    print_summary(summarise(tmp_path))
    assert "no ledger" in capsys.readouterr().out


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=8)


def cells(rows, low=0, high=30):
    """Unit cells that the intervals cover: an obviously right union for whole numbers."""
    covered = np.zeros(31, dtype=bool)
    for start, end in rows:
        covered[max(int(start), low) : min(int(end), high)] = True
    return covered


@settings(deadline=None)
@given(first=intervals, second=intervals)
def test_interval_arithmetic_agrees_with_counting_cells(first, second):
    a, b = merge_intervals(first, 3, 25), merge_intervals(second, 0, 30)
    assert total(a) == cells(first, 3, 25).sum()
    assert total(intersect(a, b)) == (cells(first, 3, 25) & cells(second)).sum()
