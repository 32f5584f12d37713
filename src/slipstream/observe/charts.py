"""The report's charts: History in, plotly figures as plain dictionaries out. A chart without data yet is None.

Each has a sentence that says what a healthy one looks like. Colours of axes and text are set by the page, so that charts follow the
reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.observe.history import History

Figure = dict[str, Any]

MAX_SPANS = 2000
"""Spans of one kind in the timeline; beyond it, neighbours closer than the picture can show are drawn as one."""
COLOURS = {"step": "#4c78a8", "publish": "#72b7b2", "checkpoint": "#b279a2", "wait_batch": "#e8b4b0", "busy": "#59a14f"}


class Chart(NamedTuple):
    """One chart of the report."""

    id: str
    title: str
    healthy: str
    draw: Callable[[History, int | None], Figure | None]
    """(history, max_off_policy_steps) -> figure."""


def reward(history: History, bound: int | None) -> Figure | None:
    keys = ["orchestrator/reward/mean", *history.keys("orchestrator/reward/", "/mean")]
    traces = [_line(history, key, _env_of(key) or "all environments") for key in dict.fromkeys(keys)]
    traces += [_line(history, key, f"{_env_of(key)}: success", dash="dot") for key in history.keys("orchestrator/success/", "/frac")]
    return _figure(traces, "step", "reward of the batch")


def evals(history: History, bound: int | None) -> Figure | None:
    traces = []
    for env in sorted({event["env"] for event in history.events["eval"]}):
        by_version = {event["version"]: event for event in history.events["eval"] if event["env"] == env}
        versions = sorted(by_version)
        for name, label, dash in (("avg_at_k", "avg@k", "solid"), ("pass_at_k", "pass@k", "dot"), ("reward_mean", "reward", "dash")):
            points = [by_version[version][name] for version in versions]
            traces.append(_xy(versions, points, f"{env}: {label}", dash, markers=True))
    return _figure(traces, "policy version", "held-out score")


def lag_histogram(history: History, bound: int | None) -> Figure | None:
    counts: dict[int, float] = {}
    for event in history.events["lag_histogram"]:
        for lag, tokens in event["counts"].items():
            counts[int(lag)] = counts.get(int(lag), 0) + tokens
    total = sum(counts.values())
    if not total:
        return None
    lags = sorted(counts)
    bars = {"type": "bar", "name": "tokens", "x": lags, "y": [counts[lag] / total for lag in lags]}
    figure = _figure([bars], "lag in policy versions", "share of trained tokens")
    if figure and bound is not None:
        figure["layout"]["shapes"] = [_vertical(bound + 0.5)]
        figure["layout"]["annotations"] = [
            {"x": bound + 0.5, "y": 1, "yref": "paper", "text": "bound", "showarrow": False, "xanchor": "left"}
        ]
    return figure


def lag(history: History, bound: int | None) -> Figure | None:
    traces = [_line(history, "trainer/lag/mean", "mean"), _line(history, "trainer/lag/max", "max")]
    figure = _figure(traces, "step", "lag in policy versions")
    if figure and bound is not None:
        figure["layout"]["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": bound, "y1": bound, "line": {"dash": "dot"}}
        ]
    return figure


def step_time(history: History, bound: int | None) -> Figure | None:
    traces = []
    for name in ("wait_batch", "step", "publish", "checkpoint"):
        steps, seconds = history.series(f"trainer/time/{name}_s")
        if len(steps):
            traces.append({"type": "bar", "name": name, "x": steps.tolist(), "y": seconds.tolist(), "marker": {"color": COLOURS[name]}})
    return _figure(traces, "step", "seconds", barmode="stack")


def timeline(history: History, bound: int | None) -> Figure | None:
    """Horizontal bars: a row a process, a colour a kind of work. x is seconds since the first line of the run."""
    origin = history.first_s or 0.0
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in history.spans:
        groups.setdefault((span.role, span.name), []).append((span.start - origin, span.end - origin))
    traces = [_bars(role, name, _coarse(np.array(sorted(spans)))) for (role, name), spans in sorted(groups.items())]
    figure = _figure(traces, "seconds since the start", "", barmode="overlay")
    if figure:
        figure["layout"]["yaxis"] |= {"type": "category", "autorange": "reversed"}
        figure["layout"]["height"] = 160 + 60 * len({role for role, _ in groups})
    return figure


def mismatch(history: History, bound: int | None) -> Figure | None:
    names = (("fresh", "lag 0"), ("stale", "lag above 0"), ("mean", "all tokens"))
    figure = _figure([_line(history, f"trainer/mismatch_kl/{name}", label) for name, label in names], "step", "KL(engine, trainer) in nats")
    if figure:
        figure["layout"]["yaxis"]["type"] = "log"
    return figure


def expert_load(history: History, bound: int | None) -> Figure | None:
    """The last report of the trainer, or of an engine where the trainer has none."""
    events = history.events["expert_load"]
    events = [event for event in events if event["role"] == "trainer"] or events
    if not events:
        return None
    load_LE = np.asarray(events[-1]["load"], dtype=np.float64)
    if load_LE.ndim != 2 or not load_LE.size:
        return None
    heat = {"type": "heatmap", "z": load_LE.tolist(), "colorscale": "Viridis", "zmin": 0, "colorbar": {"title": {"text": "share"}}}
    figure = _figure([heat], "expert", "MoE layer")
    if figure:
        figure["layout"]["yaxis"] |= {"dtick": 1, "autorange": "reversed"}
    return figure


def throughput(history: History, bound: int | None) -> Figure | None:
    origin = history.first_s or 0.0
    traces = []
    for role in history.roles("engine"):
        times, tokens = history.counter(role, "engine/tokens/generated")
        traces.append(_rate(times - origin, tokens, f"{role}: generated"))
    times, trained = history.samples("trainer", "trainer/tokens/trained")
    traces.append(_rate(times - origin, np.cumsum(trained), "trained"))
    return _figure(traces, "seconds since the start", "tokens per second")


def policy(history: History, bound: int | None) -> Figure | None:
    traces = [_line(history, "trainer/entropy/mean", "entropy (nats)"), _line(history, "trainer/grad/norm", "gradient norm")]
    return _figure(traces, "step", "")


def ratios(history: History, bound: int | None) -> Figure | None:
    names = (
        ("trainer/ratio/extreme_frac", "ratio outside [0.5, 2]"),
        ("trainer/ratio/masked_frac", "dropped by the loss"),
        ("trainer/replay/flip_frac", "routing that would differ without replay"),
    )
    return _figure([_line(history, key, label) for key, label in names], "step", "share of tokens")


def concurrency(history: History, bound: int | None) -> Figure | None:
    names = (("concurrency/limit", "limit"), ("in_flight/count", "in flight"), ("ready/samples", "ready samples"))
    return _figure([_line(history, f"orchestrator/{key}", label) for key, label in names], "step", "rollouts")


CHARTS = (
    Chart(
        "reward",
        "Reward",
        "Healthy: rises and flattens; every environment takes part. Flat from the first step: too hard or too easy.",
        reward,
    ),
    Chart("evals", "Held-out evaluation", "Healthy: rises with the training reward, and pass@k does not fall while avg@k rises.", evals),
    Chart(
        "timeline", "Who did what when", "Healthy: the engine's row is filled while the trainer works, and neither has long gaps.", timeline
    ),
    Chart(
        "step-time", "Where the time of a step goes", "Healthy: mostly `step`. Much `wait_batch`: generation is the bottleneck.", step_time
    ),
    Chart("throughput", "Tokens per second", "Healthy: level; a sag of one side while the other holds names the bottleneck.", throughput),
    Chart("lag-histogram", "Lag of the trained tokens", "Healthy: most tokens at lag 0 or 1, and none beyond the bound.", lag_histogram),
    Chart("lag", "Lag by step", "Healthy: level. A mean that climbs means that ready samples pile up before the trainer.", lag),
    Chart(
        "mismatch",
        "Mismatch KL",
        "Healthy: lag 0 stays at rounding level (below 1e-6 in float32, 1e-3 with a bfloat16 engine); above 0 it stays below 1e-2.",
        mismatch,
    ),
    Chart("ratios", "Importance ratios and routing", "Healthy: below 0.05; more than 0.1 outside [0.5, 2] precedes a collapse.", ratios),
    Chart("policy", "Entropy and gradient norm", "Healthy: entropy falls slowly and stays above 0; the norm stays steady.", policy),
    Chart(
        "experts",
        "Expert load",
        "Healthy: no dark column (a starved expert) and no single bright one (a hot expert) in a layer.",
        expert_load,
    ),
    Chart("concurrency", "Rollouts under way", "Healthy: in flight follows the limit; ready samples stay below one batch.", concurrency),
)


def _line(history: History, key: str, label: str, dash: str = "solid") -> Figure | None:
    steps, values = history.series(key)
    return _xy(steps.tolist(), values.tolist(), label, dash) if len(steps) else None


def _xy(x: list, y: list, label: str, dash: str, markers: bool = False) -> Figure:
    mode = "lines+markers" if markers or len(x) < 3 else "lines"
    return {"type": "scatter", "mode": mode, "name": label, "x": x, "y": y, "line": {"dash": dash}}


def _rate(times: np.ndarray, totals: np.ndarray, label: str) -> Figure | None:
    """Growth per second between samples; samples at one instant are left out."""
    if len(times) < 2:
        return None
    seconds = np.diff(times)
    grows = seconds > 0
    return _xy(times[1:][grows].tolist(), (np.diff(totals)[grows] / seconds[grows]).tolist(), label, "solid")


def _bars(role: str, name: str, rows: np.ndarray) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"{role.partition('-')[0]}: {name}",
        "legendgroup": name,
        "base": rows[:, 0].round(4).tolist(),
        "x": (rows[:, 1] - rows[:, 0]).round(4).tolist(),
        "y": [role] * len(rows),
        "marker": {"color": COLOURS.get(name, "#9c755f"), "line": {"width": 0}},
        "hovertemplate": f"{name}: %{{x:.3f}} s from %{{base:.2f}} s<extra></extra>",
    }


def _coarse(rows: np.ndarray) -> np.ndarray:
    """At most about MAX_SPANS rows: gaps below a pixel or so are closed."""
    if len(rows) <= MAX_SPANS:
        return rows
    gap = (rows[:, 1].max() - rows[:, 0].min()) / MAX_SPANS
    starts = np.concatenate([[True], rows[1:, 0] - np.maximum.accumulate(rows[:-1, 1]) > gap])
    first = np.flatnonzero(starts)
    return np.stack([rows[first, 0], np.maximum.reduceat(rows[:, 1], first)], axis=1)


def _env_of(key: str) -> str | None:
    """'calculator' from 'orchestrator/reward/calculator/mean'."""
    parts = key.split("/")
    return parts[2] if len(parts) == 4 else None


def _vertical(x: float) -> Figure:
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": {"dash": "dot"}}


def _figure(traces: Sequence[Figure | None], x_title: str, y_title: str, **layout: Any) -> Figure | None:
    data = [trace for trace in traces if trace is not None]
    if not data:
        return None
    axes = {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}  # grows upwards, and pushes the plot down: it never covers it
    return {"data": data, "layout": {"height": 340, "margin": {"l": 60, "r": 15, "t": 30, "b": 45}, "legend": legend, **axes, **layout}}
