"""What a run did, as one dictionary and as a table. Derived from the run folder alone; works while the run goes on and after a crash.

The *training window* runs from the start of the first trainer step to the end of the last step or publish: loading, warm-up and the
evaluations around it are outside. Busy shares and rates are over this window; `wall_s` is from the first line to the last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from slipstream.config import RunConfig, load
from slipstream.errors import ConfigError
from slipstream.observe.history import History, intersect, merge_intervals, total
from slipstream.observe.ledger import read_ledger


def summarise(run_folder: Path, history: History | None = None) -> dict[str, Any]:
    """The run in numbers; None where the run folder does not say.

    `eval_first`, `eval_last`: avg@k of the first and last evaluated policy version, mean over environments. `overlap_frac`: of the
    time during which the less busy side (all engines, or the trainer) computes, the share in which the other one computes too.
    `lag_mean`, `mismatch_kl_mean`: weighted by loss tokens. `history`: of the same run, where the caller has read it already.
    """
    run_folder = Path(run_folder)
    if history is None:
        history = History(run_folder)
        history.poll()
    config = read_config(run_folder)
    ledger = read_ledger(run_folder)
    steps, samples = history.series("trainer/samples/trained")
    return {
        "run": run_folder.name,
        "steps": int(steps.max()) if len(steps) else 0,
        "max_steps": config.max_steps if config else None,
        "wall_s": history.last_s - history.first_s if history.first_s is not None and history.last_s is not None else 0.0,
        "samples_trained": int(samples.sum()),
        **_evals(history),
        **_outcomes(history, ledger),
        **_lag_and_mismatch(history),
        "max_off_policy_steps": config.orchestrator.max_off_policy_steps if config else None,
        **_busy(history),
        "versions_published": len(_versions(history)),
        "steps_skipped": int(history.series("trainer/step/skipped")[1].sum()),
        "unreadable_lines": history.unreadable,
    }


def read_config(run_folder: Path) -> RunConfig | None:
    """The run's resolved configuration; None when there is none that this build reads."""
    try:
        return load(RunConfig, [Path(run_folder) / "config.toml"])
    except ConfigError:
        return None


def training_window(history: History) -> tuple[float, float] | None:
    """Start of the first step to the end of the last step or publish, seconds since the epoch; None before the first step."""
    starts = [span.start for span in history.find_spans("trainer", "step")]
    if not starts:
        return None
    return min(starts), max(span.end for span in history.find_spans("trainer", "step", "publish"))


def _evals(history: History) -> dict[str, Any]:
    """Scores by version: a repeated evaluation of one version and environment replaces the earlier one."""
    scores: dict[int, dict[str, Any]] = {}
    for event in history.events["eval"]:
        scores.setdefault(event["version"], {})[event["env"]] = event
    table = [
        {"version": version, "env": env, **{name: event.get(name) for name in ("avg_at_k", "pass_at_k", "reward_mean", "samples")}}
        for version, envs in sorted(scores.items())
        for env, event in sorted(envs.items())
    ]
    first, last = (min(scores), max(scores)) if scores else (None, None)
    return {
        "eval_first": _mean(row["avg_at_k"] for row in table if row["version"] == first),
        "eval_last": _mean(row["avg_at_k"] for row in table if row["version"] == last),
        "eval_reward_first": _mean(row["reward_mean"] for row in table if row["version"] == first),
        "eval_reward_last": _mean(row["reward_mean"] for row in table if row["version"] == last),
        "evals": table,
    }


def _outcomes(history: History, ledger: dict[str, Any] | None) -> dict[str, Any]:
    """From the ledger, which is exact; from the last metrics line where the ledger is missing."""
    if ledger:
        outcomes, reasons = ledger["by_outcome"], ledger["by_reason"]
    else:
        outcomes = {name: int(count) for name, count in history.by_suffix("orchestrator/rollouts/").items()}
        reasons = {name: int(count) for name, count in history.by_suffix("orchestrator/dropped/").items()}
    return {
        "rollouts_issued": ledger["issued"] if ledger else None,
        "rollouts_by_outcome": outcomes,
        "rollouts_by_status": ledger["by_status"] if ledger else {},
        "dropped_by_reason": reasons,
        "ledger_balanced": ledger["balanced"] if ledger else None,
    }


def _lag_and_mismatch(history: History) -> dict[str, Any]:
    lag_max = history.series("trainer/lag/max")[1]
    return {
        "lag_mean": _weighted(history, "trainer/lag/mean"),
        "lag_max": int(lag_max.max()) if len(lag_max) else None,
        "mismatch_kl_mean": _weighted(history, "trainer/mismatch_kl/mean"),
        "mismatch_kl_fresh": _mean(history.series("trainer/mismatch_kl/fresh")[1]),
        "mismatch_kl_stale": _mean(history.series("trainer/mismatch_kl/stale")[1]),
    }


def _weighted(history: History, key: str) -> float | None:
    """Mean of a per-token metric over the run, each step with its number of loss tokens."""
    steps, values = history.series(key)
    tokens = dict(zip(*(array.tolist() for array in history.series("trainer/tokens/loss")), strict=True))
    weights = np.array([tokens.get(step, 0.0) for step in steps.tolist()])
    return float((values * weights).sum() / weights.sum()) if weights.sum() > 0 else None


def _busy(history: History) -> dict[str, Any]:
    """Who computed for how much of the training window, and how fast."""
    names = ("window_s", "step_wall_s", "engine_busy_frac", "trainer_busy_frac", "overlap_frac", "generated_tokens_per_s")
    window = training_window(history)
    if window is None:
        return dict.fromkeys((*names, "trained_tokens_per_s"))
    low, high = window
    seconds = high - low
    engines = history.roles("engine")
    busy = [
        merge_intervals(((s.start, s.end) for s in history.find_spans("engine", "busy") if s.role == role), low, high) for role in engines
    ]
    any_engine = merge_intervals((tuple(row) for rows in busy for row in rows.tolist()), low, high)
    trainer = merge_intervals(((s.start, s.end) for s in history.find_spans("trainer", "step", "publish")), low, high)
    less_busy = min(total(any_engine), total(trainer))
    steps, trained = history.series("trainer/tokens/trained")
    return {
        "window_s": seconds,
        "step_wall_s": seconds / len(steps) if len(steps) else None,
        "engine_busy_frac": sum(total(rows) for rows in busy) / (len(engines) * seconds) if engines else None,
        "trainer_busy_frac": total(trainer) / seconds,
        "overlap_frac": total(intersect(any_engine, trainer)) / less_busy if less_busy else 0.0,
        "generated_tokens_per_s": sum(_grown(history, role, low, high) for role in engines) / seconds,
        "trained_tokens_per_s": float(trained.sum()) / seconds,
    }


def _grown(history: History, role: str, low: float, high: float) -> float:
    """Tokens that one engine sampled within the window, interpolated between its reports."""
    times, values = history.counter(role, "engine/tokens/generated")
    if not len(times):
        return 0.0
    before, after = np.interp([low, high], times, values)
    return float(after - before)


def _versions(history: History) -> set[int]:
    published = {span.step for span in history.find_spans("trainer", "publish") if span.step >= 0}
    return published | {event["version"] for event in history.events["published"]}


def _mean(values: Any) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """The summary as tables: evaluation before and after, then what it cost, then where the rollouts went."""
    console = console or Console()
    tables = [_figures_table(summary), _counts_table(summary)]
    console.print(*([_eval_table(summary)] if summary["evals"] else []), *tables)


def _eval_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['run']}: held-out evaluation")
    for name in ("environment", "", "policy version", "avg@k", "pass@k", "reward"):
        table.add_column(name, justify="left" if name in ("environment", "") else "right")
    for env in sorted({row["env"] for row in summary["evals"]}):
        rows = [row for row in summary["evals"] if row["env"] == env]
        for label, row in [("before", rows[0]), ("after", rows[-1])][: len(rows)]:
            scores = (_number(row[name]) for name in ("avg_at_k", "pass_at_k", "reward_mean"))
            table.add_row(env, label, str(row["version"]), *scores)
    return table


def _figures_table(summary: dict[str, Any]) -> Table:
    table = Table(title="run", show_header=False)
    steps = f"{summary['steps']} of {summary['max_steps']}" if summary["max_steps"] is not None else str(summary["steps"])
    lag = f"{_number(summary['lag_mean'])} mean, {_number(summary['lag_max'])} max (bound {_number(summary['max_off_policy_steps'])})"
    kl = " / ".join(_number(summary[f"mismatch_kl_{name}"]) for name in ("mean", "fresh", "stale"))
    balanced = {True: "yes", False: "NO", None: "no ledger"}[summary["ledger_balanced"]]
    for name, value in (
        ("steps", steps),
        ("wall time", f"{summary['wall_s']:.1f} s, {_number(summary['step_wall_s'])} s a step"),
        ("samples trained", str(summary["samples_trained"])),
        ("busy: engine / trainer", f"{_percent(summary['engine_busy_frac'])} / {_percent(summary['trainer_busy_frac'])}"),
        ("overlap", _percent(summary["overlap_frac"])),
        ("tokens/s: generated / trained", f"{_number(summary['generated_tokens_per_s'])} / {_number(summary['trained_tokens_per_s'])}"),
        ("lag (versions)", lag),
        ("mismatch KL: all / fresh / stale", kl),
        ("versions published", str(summary["versions_published"])),
        ("ledger balanced", balanced),
    ):
        table.add_row(name, value)
    return table


def _counts_table(summary: dict[str, Any]) -> Table:
    table = Table(title="rollouts")
    table.add_column("outcome or reason")
    table.add_column("rollouts", justify="right")
    for name, count in sorted(summary["rollouts_by_outcome"].items()):
        table.add_row(name, str(count))
    for name, count in sorted(summary["dropped_by_reason"].items()):
        table.add_row(f"not trained: {name}", str(count))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
