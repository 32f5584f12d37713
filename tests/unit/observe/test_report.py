"""The report of the synthetic run: every chart is there with the right data, nothing leaves the page, nothing untrusted gets in."""

import json
import re
import sqlite3
from contextlib import closing
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest

from slipstream.observe import charts, metrics
from slipstream.observe.history import History
from slipstream.observe.metrics import FILE, MetricsWriter
from slipstream.observe.picks import pick_recent
from slipstream.observe.report import _script, write_report
from slipstream.observe.rollouts import RolloutWriter

from .synthetic import ENV, FakeClock, make_run, rollout

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Ids of sections with the JSON of their chart, and every attribute that could load something."""

    def __init__(self, text: str):
        super().__init__()
        self.figures: dict[str, dict] = {}
        self.loads: list[str] = []
        self.tags: list[str] = []
        self._section, self._json = "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.loads += [values[name] for name in ("src", "href") if name in values]
        if tag == "section":
            self._section = values["id"]
        self._json = tag == "script" and values.get("type") == "application/json"

    def handle_endtag(self, tag):
        self._json = False

    def handle_data(self, data):
        if self._json:
            self.figures[self._section] = json.loads(data)


def page_of(run_folder) -> Page:
    return Page(write_report(run_folder).read_text())


@pytest.fixture
def run(tmp_path, monkeypatch):
    return make_run(tmp_path / "run", monkeypatch)


def test_every_chart_is_on_the_page_and_plotly_accepts_it(run):
    figures = page_of(run).figures
    assert set(figures) == {chart.id for chart in charts.CHARTS}
    for figure in figures.values():
        go.Figure(figure)


def test_every_chart_says_what_a_healthy_one_looks_like(run):
    text = write_report(run).read_text()
    assert all(chart.healthy.startswith("Healthy:") for chart in charts.CHARTS)
    assert text.count('<p class="healthy">Healthy:') == len(charts.CHARTS) + 2


def test_the_charts_show_the_numbers_of_the_run(run):
    figures = page_of(run).figures
    reward = {trace["name"]: trace for trace in figures["reward"]["data"]}
    assert reward[ENV]["x"] == [1, 2, 3, 4, 5]
    assert reward[ENV]["y"] == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7])
    evals = {trace["name"]: trace for trace in figures["evals"]["data"]}
    assert evals[f"{ENV}: avg@k"]["x"] == [0, 5]
    assert evals[f"{ENV}: avg@k"]["y"] == pytest.approx([0.25, 0.75])
    (lags,) = figures["lag-histogram"]["data"]
    assert (lags["x"], lags["y"]) == ([0, 1], [0.6, 0.4])
    assert figures["lag-histogram"]["layout"]["shapes"][0]["x0"] == 2.5
    stacked = {trace["name"]: trace["y"] for trace in figures["step-time"]["data"]}
    assert stacked == {"wait_batch": [1.0] * 5, "step": [2.0] * 5, "publish": [0.5] * 5, "checkpoint": [0.0] * 5}
    assert np.shape(figures["experts"]["data"][0]["z"]) == (2, 4)
    generated = next(trace for trace in figures["throughput"]["data"] if trace["name"].startswith("engine-0"))
    assert generated["y"] == pytest.approx([250] * 5)
    trained = next(trace for trace in figures["throughput"]["data"] if trace["name"] == "trained")
    assert trained["y"] == pytest.approx([800 / 4] * 4)


def test_the_timeline_has_a_row_for_each_process(run):
    traces = {trace["name"]: trace for trace in page_of(run).figures["timeline"]["data"]}
    assert set(traces) == {"trainer: step", "trainer: publish", "trainer: wait_batch", "engine: busy"}
    assert traces["trainer: step"]["base"] == pytest.approx([1, 5, 9, 13, 17])
    assert traces["trainer: step"]["x"] == pytest.approx([2] * 5)
    assert set(traces["engine: busy"]["y"]) == {"engine-0"}


def test_no_legend_covers_its_plot_however_narrow_the_page(run):
    for figure in page_of(run).figures.values():
        legend = figure["layout"]["legend"]
        assert legend["y"] > 1 and legend["yanchor"] == "bottom"


def test_a_long_timeline_is_drawn_with_few_bars_that_cover_the_same_ground():
    starts = np.arange(50_000) * 0.01
    rows = charts._coarse(np.stack([starts, starts + 0.008], axis=1))
    assert len(rows) <= charts.MAX_SPANS
    assert rows[0, 0] == 0 and rows[-1, 1] == pytest.approx(499.998)


def test_a_gap_that_can_be_seen_stays_in_a_long_timeline():
    starts = np.concatenate([np.arange(3000) * 0.01, 100 + np.arange(3000) * 0.01])
    rows = charts._coarse(np.stack([starts, starts + 0.008], axis=1))
    assert rows[0, 1] == pytest.approx(29.998) and rows[1, 0] == 100


def test_the_page_needs_nothing_from_outside(run):
    page = page_of(run)
    assert page.loads == []
    assert "link" not in page.tags and "iframe" not in page.tags


def test_transcripts_outcomes_reasons_and_configuration_are_on_the_page(run):
    text = write_report(run).read_text()
    for part in ("I guess 7", "The answer is 49", "before: policy version 0", "after: policy version 5", "Last steps, best"):
        assert part in text
    for part in ("<td>cut</td>", "<td>zero_advantage</td>", "max_off_policy_steps = 2", "config_fingerprint"):
        assert part in text


def test_the_page_says_what_was_learned_with_the_same_task_before_and_after(run):
    text = write_report(run).read_text()
    section = text[text.index('<section id="learned">') : text.index("</section>", text.index('<section id="learned">'))]
    assert "under policy versions 0 and 5: 1 better, 0 worse, 0 equal" in section
    row = '<tr><td>correct</td><td class="n">0.000</td><td class="n">1.000</td><td class="n">+1.000</td><td class="n">1</td></tr>'
    assert row in section
    assert (
        "before: policy version 0, reward 0.000 (correct 0)" in section and "after: policy version 5, reward 1.000 (correct 1)" in section
    )
    assert section.count("What is 7 times 7?") == 1


def test_what_the_policy_wrote_cannot_become_markup(run, monkeypatch):
    monkeypatch.setattr(metrics, "time", FakeClock())
    RolloutWriter(run).write(6, [rollout("evil", 2.0, EVIL, version=5)])
    MetricsWriter(run, "orchestrator").event("eval", version=5, env=EVIL, avg_at_k=1.0, pass_at_k=1.0, reward_mean=1.0, samples=1)
    path = write_report(run)
    page = Page(path.read_text())
    assert "alert(1)" in path.read_text()
    assert EVIL not in path.read_text()
    assert "img" not in page.tags
    assert any(EVIL in trace["name"] for trace in page.figures["evals"]["data"])


def test_json_in_the_page_holds_no_character_that_could_open_a_tag():
    value = {"name": EVIL + "&lt;!--"}
    assert not set("<>&") & set(_script(value))
    assert json.loads(_script(value)) == value


def test_an_empty_folder_has_a_report_that_says_so(tmp_path):
    text = write_report(tmp_path).read_text()
    assert text.count("No data yet.") == len(charts.CHARTS)
    assert "No rollouts yet." in text and "Not known before the second evaluation." in text


def test_a_run_that_died_in_its_first_step_has_a_report(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", monkeypatch, steps=1, ledger=False, rollouts=False)
    with (run / FILE).open("ab") as file:
        file.write(b'{"kind":"span","role":"tr')
    with (run / FILE).open("ab") as file:
        file.write(b'\n{"kind":"event","role":"engine-0","time":1700000004.0,"name":"expert_load","load":[[0.5,0.5]]}\n')
    text = write_report(run).read_text()
    assert "1 torn lines in metrics.jsonl were skipped" in text
    assert "no ledger" in text


def test_a_damaged_rollout_file_is_named_and_the_rest_of_the_report_is_there(run):
    path = run / "rollouts" / "step_000005.parquet"
    path.write_bytes(path.read_bytes()[:100])
    text = write_report(run).read_text()
    assert "step_000005.parquet is not readable" in text
    assert 'id="reward"' in text


def test_an_unbalanced_ledger_is_said_at_the_top(run):
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        ledger.execute("update rollouts set status = 'lost' where id = 'y'")
        ledger.commit()
    assert "The ledger does not balance" in write_report(run).read_text()


def test_best_worst_and_random_come_from_the_last_steps(run):
    picks = pick_recent(run)
    assert [pick.label for pick in picks] == ["worst", "best", "random", "random"]
    assert "No idea" in picks[0].text and "The answer is 49" in picks[1].text
    assert all("step 1" not in pick.text and "step 2" not in pick.text for pick in picks)


def test_a_chart_without_data_is_none(tmp_path):
    history = History(tmp_path)
    assert [chart.id for chart in charts.CHARTS if chart.draw(history, 2) is not None] == []


def test_the_page_script_is_whole(run):
    """A cheap guard against a template edit that unbalances the drawing code; the browser has the last word."""
    script = re.findall(r"<script>\s*const dark.*?</script>", write_report(run).read_text(), re.DOTALL)
    assert len(script) == 1
    assert all(script[0].count(a) == script[0].count(b) for a, b in ("()", "{}", "[]"))
