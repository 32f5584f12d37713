"""The live view: what it says about now, plain lines without a terminal, one panel with one."""

import io

import pytest
from rich.console import Console

from slipstream.observe import metrics
from slipstream.observe.dashboard import Dashboard, duration, sparkline
from slipstream.observe.history import History
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.snapshot import Snapshot, take_snapshot

from .synthetic import STEP_S, T0, FakeClock, make_run, orchestrator_values, trainer_values, write_metrics


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


def shown(view: Console) -> str:
    return view.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_the_snapshot_has_the_numbers_of_the_run(tmp_path, monkeypatch):
    history = History(make_run(tmp_path / "run", monkeypatch))
    history.poll()
    now = take_snapshot(history)
    assert now.step == 5
    assert now.reward == pytest.approx(0.7)
    assert now.success == {"calculator": pytest.approx(0.5)}
    assert now.evals == {"calculator": (5, pytest.approx(0.75))}
    assert now.step_s == pytest.approx(STEP_S)
    assert now.eta_s(8) == pytest.approx(3 * STEP_S)
    assert now.trainer_wait_frac == pytest.approx(1 / 3.5)
    assert now.engine_busy_frac == pytest.approx(0.75)
    assert now.generated_per_s == pytest.approx(250)
    assert now.trained_per_s == pytest.approx(800 / STEP_S)
    assert now.outcomes == {"completed": 45, "cut": 5}
    assert now.verdict == "the trainer waits for rollouts 29% of the time"


@pytest.mark.parametrize(
    ("wait", "busy", "verdict"),
    [
        (None, None, "waiting for the first batch"),
        (0.5, 0.9, "the trainer waits for rollouts 50% of the time"),
        (0.1, 0.5, "the engine is idle 50% of the time"),
        (0.1, 0.95, "engine and trainer are balanced"),
        (0.3, 0.4, "the engine is idle 60% of the time"),
    ],
)
def test_the_verdict_names_the_side_that_waits_more(wait, busy, verdict):
    assert Snapshot(trainer_wait_frac=wait, engine_busy_frac=busy).verdict == verdict


def test_without_a_terminal_there_is_one_line_a_step_and_no_escape_code(tmp_path, clock):
    view = console(terminal=False)
    dashboard = Dashboard(tmp_path, 3, view)
    write_metrics(tmp_path, clock, 2)
    dashboard.poll()
    dashboard.poll()
    dashboard.close()
    lines = shown(view).splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step")] == ["step 1/3", "step 2/3"]
    assert [line for line in lines if line.startswith("eval")] == [
        "eval   v0 calculator: avg@k 0.250, pass@k 0.250",
        "eval   v2 calculator: avg@k 0.450, pass@k 0.450",
    ]
    assert "\x1b" not in shown(view)
    assert "eta 0:04" in lines[-2]


def test_a_resumed_run_does_not_print_its_past_again(tmp_path, clock):
    write_metrics(tmp_path, clock, 2)
    view = console(terminal=False)
    dashboard = Dashboard(tmp_path, 4, view)
    writer = MetricsWriter(tmp_path, "trainer")
    writer.log(2, trainer_values(2))
    writer.log(3, trainer_values(3))
    dashboard.close()
    assert [line.split(" | ")[0] for line in shown(view).splitlines()] == ["step 3/4"]


def test_on_a_terminal_the_panel_shows_progress_reward_eval_lag_rates_and_outcomes(tmp_path, clock):
    view = console(terminal=True)
    dashboard = Dashboard(tmp_path, 10, view)
    dashboard.poll()
    write_metrics(tmp_path, clock, 5)
    dashboard.poll()
    dashboard.close()
    dashboard.close()
    text = shown(view)
    for part in (
        "step 5 of 10",
        "eta 0:20",
        "eval calculator",
        "0.750 at v5",
        "generated tokens/s",
        "250",
        "trainer waits",
        "cut",
        "dropped",
    ):
        assert part in text


def test_markup_in_names_is_shown_as_text(tmp_path, clock):
    view = console(terminal=True)
    dashboard = Dashboard(tmp_path, 1, view)
    MetricsWriter(tmp_path, "orchestrator").log(1, orchestrator_values(1) | {"orchestrator/dropped/[red]odd[x]": 1})
    dashboard.close()
    assert "[red]odd[x]" in shown(view)


def test_a_growing_file_is_read_only_once(tmp_path, clock):
    history = History(tmp_path)
    write_metrics(tmp_path, clock, 1)
    assert len(history.poll()) > 0
    assert history.poll() == []
    assert history.first_s == T0


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0, "0:00"), (62.4, "1:02"), (3723, "1:02:03")])
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_a_sparkline_goes_from_the_lowest_to_the_highest_bar():
    assert sparkline([0, 1, 0.5]) == "▁█▅"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([]) == ""
