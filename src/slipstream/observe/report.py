"""report.html: the whole run on one page that needs no network, no server and no other file.

The template escapes everything that it prints: transcripts and names come from the policy and from environments, and are untrusted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import plotly.offline

from slipstream.errors import WireError
from slipstream.observe.charts import CHARTS
from slipstream.observe.history import History
from slipstream.observe.learned import Learned, what_it_learned
from slipstream.observe.picks import Pick, pick_recent
from slipstream.observe.summary import read_config, summarise

FILE = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder and return its path. Works while the run goes on, and on a crashed run."""
    run_folder = Path(run_folder)
    history = History(run_folder)
    history.poll()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        (Path(__file__).parent / "report.html.jinja").read_text()
    )
    summary = summarise(run_folder, history)
    recent, learned, problem = _transcripts(run_folder)
    page = template.render(
        summary=summary,
        figures=_headline(summary),
        charts=_charts(history, run_folder),
        recent=recent,
        learned=learned,
        problem=problem,
        config=_text(run_folder / "config.toml"),
        manifest=_text(run_folder / "manifest.json"),
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        plotly=plotly.offline.get_plotlyjs(),
    )
    path, temporary = run_folder / FILE, run_folder / f".{FILE}.tmp"
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def _charts(history: History, run_folder: Path) -> list[dict[str, Any]]:
    """Every chart of the list; `json` is None where the run has no data for it yet."""
    config = read_config(run_folder)
    bound = config.orchestrator.max_off_policy_steps if config else None
    charts = []
    for chart in CHARTS:
        figure = chart.draw(history, bound)
        charts.append({"id": chart.id, "title": chart.title, "healthy": chart.healthy, "json": None if figure is None else _script(figure)})
    return charts


def _script(value: Any) -> str:
    """JSON that may stand inside a script element: no character in it can end the element."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _transcripts(run_folder: Path) -> tuple[list[Pick], list[Learned], str]:
    """Transcripts to show, and what is wrong with the store if it cannot be read: the rest of the page is still worth having."""
    try:
        return pick_recent(run_folder), what_it_learned(run_folder), ""
    except WireError as error:
        return [], [], str(error)


def _headline(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures at the top of the page."""

    def number(name: str) -> str:
        value = summary[name]
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    def percent(name: str) -> str:
        return "-" if summary[name] is None else f"{summary[name]:.0%}"

    return [
        ("steps", f"{number('steps')} of {number('max_steps')}"),
        ("held-out avg@k", f"{number('eval_first')} → {number('eval_last')}"),
        ("wall time", f"{number('wall_s')} s"),
        ("samples trained", number("samples_trained")),
        ("engine busy", percent("engine_busy_frac")),
        ("trainer busy", percent("trainer_busy_frac")),
        ("overlap", percent("overlap_frac")),
        ("lag mean / max", f"{number('lag_mean')} / {number('lag_max')}"),
        ("lag bound", number("max_off_policy_steps")),
        ("mismatch KL", number("mismatch_kl_mean")),
        ("generated tokens/s", number("generated_tokens_per_s")),
        ("trained tokens/s", number("trained_tokens_per_s")),
        ("versions published", number("versions_published")),
        ("ledger balanced", {True: "yes", False: "NO", None: "no ledger"}[summary["ledger_balanced"]]),
    ]


def _text(path: Path) -> str:
    """The file's text; '' when it is not there."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
