"""The live view of a run: a panel that redraws itself on a terminal, one line a step everywhere else.

Reads metrics.jsonl alone, so it shows a run of other processes, and a run that is resumed goes on where it was. It knows nothing
about those processes: the supervisor calls `poll` every half second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.observe.history import History
from slipstream.observe.metrics import Record
from slipstream.observe.snapshot import Snapshot, take_snapshot

_BARS = "▁▂▃▄▅▆▇█"


class Dashboard:
    """`poll()` takes in what is new and shows it; `close()` leaves the last state on the screen."""

    def __init__(self, run_folder: Path, max_steps: int, console: Console | None = None):
        self._history = History(run_folder)
        self._history.poll()
        self._name = Path(run_folder).name
        self._max_steps = max_steps
        self._console = console or Console()
        self._printed = take_snapshot(self._history).step
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, auto_refresh=False)
            self._live.start()

    def poll(self) -> None:
        """Show what has happened since the last call."""
        records = self._history.poll()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            return
        for record in records:
            self._print(record)

    def close(self) -> None:
        """Take in the last lines and give the terminal back. Idempotent."""
        self.poll()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, record: Record) -> None:
        if record["kind"] == "event" and record["name"] == "eval":
            line = f"eval   v{record['version']} {record['env']}: avg@k {record['avg_at_k']:.3f}, pass@k {record['pass_at_k']:.3f}"
            self._console.out(line, highlight=False)
        elif record["kind"] == "metrics" and "trainer/samples/trained" in record["values"] and record["step"] > self._printed:
            self._printed = record["step"]
            self._console.out(step_line(take_snapshot(self._history), record["step"], self._max_steps), highlight=False)

    def _panel(self) -> Panel:
        snapshot = take_snapshot(self._history)
        rewards = self._history.recent("orchestrator/reward/mean", 60)
        body = Group(_progress(snapshot, self._max_steps), _columns(snapshot, rewards), Text(snapshot.verdict, style="bold"))
        return Panel(body, title=f"slipstream · {self._name}", border_style="cyan")


def step_line(snapshot: Snapshot, step: int, max_steps: int) -> str:
    """One step as one line, for logs and pipes."""
    parts = [f"step {step}/{max_steps}", f"reward {_number(snapshot.reward)}"]
    parts += [f"success {env} {value:.2f}" for env, value in snapshot.success.items()]
    parts.append(f"lag {_number(snapshot.lag_mean)} max {_number(snapshot.lag_max)}")
    parts.append(f"{_number(snapshot.step_s)} s/step")
    parts.append(f"tokens/s {_number(snapshot.generated_per_s)} generated {_number(snapshot.trained_per_s)} trained")
    parts.append(snapshot.verdict)
    parts.append(f"eta {duration(snapshot.eta_s(max_steps))}")
    return " | ".join(parts)


def duration(seconds: float | None) -> str:
    """'1:02:03', '2:03'; '-' when unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: list[float]) -> str:
    """The values as a row of bars from their lowest to their highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def _progress(snapshot: Snapshot, max_steps: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, max_steps), completed=snapshot.step, width=40)
    grid.add_row(
        bar, f"step {snapshot.step} of {max_steps}", f"{_number(snapshot.step_s)} s/step", f"eta {duration(snapshot.eta_s(max_steps))}"
    )
    return grid


def _columns(snapshot: Snapshot, rewards: list[float]) -> Table:
    grid = Table.grid(padding=(0, 4))
    grid.add_row(_learning(snapshot, rewards), _flow(snapshot), _counts(snapshot))
    return grid


def _learning(snapshot: Snapshot, rewards: list[float]) -> Table:
    rows = [("reward", f"{_number(snapshot.reward)} {sparkline(rewards[-20:])}")]
    rows += [(f"success {env}", f"{value:.0%}") for env, value in snapshot.success.items()]
    rows += [(f"eval {env}", f"{score:.3f} at v{version}") for env, (version, score) in snapshot.evals.items()]
    rows += [("entropy", _number(snapshot.entropy)), ("mismatch KL", _number(snapshot.mismatch_kl))]
    rows.append(("lag", f"{_number(snapshot.lag_mean)} mean, {_number(snapshot.lag_max)} max"))
    return _pairs(rows)


def _flow(snapshot: Snapshot) -> Table:
    return _pairs(
        [
            ("generated tokens/s", _number(snapshot.generated_per_s)),
            ("trained tokens/s", _number(snapshot.trained_per_s)),
            ("engine busy", _percent(snapshot.engine_busy_frac)),
            ("trainer waits", _percent(snapshot.trainer_wait_frac)),
            ("in flight", f"{_number(snapshot.in_flight)} of {_number(snapshot.concurrency)}"),
            ("ready samples", _number(snapshot.ready)),
            ("KV cache used", _percent(snapshot.kv_used_frac)),
        ]
    )


def _counts(snapshot: Snapshot) -> Table:
    rows = [(name, f"{count:.0f}") for name, count in snapshot.outcomes.items()]
    rows += [(f"dropped {name}", f"{count:.0f}") for name, count in snapshot.dropped.items()]
    return _pairs(rows)


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column()
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
