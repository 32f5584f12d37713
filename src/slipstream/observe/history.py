"""A run's metrics.jsonl arranged for looking at: series by step, samples by time, spans by role. Grows by polling.

After a crash and a resume, steps since the last checkpoint appear twice in the file: the later line replaces the earlier one.
Cumulative counters of a process restart from 0 with it: `counter` joins the pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slipstream.observe.metrics import MetricsTail, Record


class Span(NamedTuple):
    """Something that took time, in seconds since the epoch."""

    role: str
    name: str
    start: float
    end: float
    step: int


class History:
    """What the roles of a run have said so far."""

    def __init__(self, run_folder: Path):
        self._tail = MetricsTail(run_folder)
        self._series: dict[str, dict[int, float]] = defaultdict(dict)
        self._samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._roles: set[str] = set()
        self.spans: list[Span] = []
        self.events: dict[str, list[Record]] = defaultdict(list)
        self.first_s: float | None = None
        """Time of the first line, seconds since the epoch; None before any."""
        self.last_s: float | None = None

    def poll(self) -> list[Record]:
        """Take in what has been written since the last poll, and return it."""
        records = self._tail.poll()
        for record in records:
            self._take(record)
        return records

    @property
    def unreadable(self) -> int:
        """Lines that were no record: torn by a crash or a full disk."""
        return self._tail.unreadable

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a key, by step; values that were not finite are left out."""
        values = self._series.get(key, {})
        steps = sorted(step for step, value in values.items() if isfinite(value))
        return np.array(steps, dtype=np.int64), np.array([values[step] for step in steps], dtype=np.float64)

    def last(self, key: str) -> float | None:
        """The latest finite value of a per-step key."""
        return next((value for value in reversed(self._series.get(key, {}).values()) if isfinite(value)), None)

    def recent(self, key: str, count: int) -> list[float]:
        """The latest finite values of a per-step key, oldest first; at most `count`."""
        values = (value for value in reversed(self._series.get(key, {}).values()) if isfinite(value))
        return list(islice(values, count))[::-1]

    def keys(self, prefix: str, suffix: str = "") -> list[str]:
        """Keys seen so far, sorted."""
        return sorted(key for key in self._series if key.startswith(prefix) and key.endswith(suffix))

    def by_suffix(self, prefix: str) -> dict[str, float]:
        """Last values of a family such as 'orchestrator/dropped/', by the rest of the key."""
        found = {key.removeprefix(prefix): self.last(key) for key in self.keys(prefix)}
        return {name: value for name, value in found.items() if value is not None}

    def roles(self, kind: str) -> list[str]:
        """Names of the processes of one kind that have spoken, such as 'engine-0' and 'engine-1' for 'engine'."""
        return sorted(role for role in self._roles if role.partition("-")[0] == kind)

    def samples(self, role: str, key: str, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Times and values of a key as one process reported it, oldest first; at most the `newest` many."""
        samples = self._samples.get((role, key), [])
        samples = samples if newest is None else samples[-newest:]
        return np.array([time for time, _ in samples], dtype=np.float64), np.array([value for _, value in samples], dtype=np.float64)

    def counter(self, role: str, key: str, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Times and values of a cumulative counter of one process; a restart from 0 goes on from the value before.

        `newest`: only that many of the latest samples.
        """
        times, raw = self.samples(role, key, newest)
        if not len(raw):
            return times, raw
        growth = np.diff(raw)
        growth = np.where(growth < 0, raw[1:], growth)
        return times, raw[0] + np.concatenate([[0.0], np.cumsum(growth)])

    def latest(self, role: str, key: str) -> float | None:
        """The last sample of a key of one process."""
        samples = self._samples.get((role, key))
        return samples[-1][1] if samples else None

    def find_spans(self, kind: str, *names: str) -> Iterator[Span]:
        """Spans of all processes of a kind with one of these names."""
        return (span for span in self.spans if span.role.partition("-")[0] == kind and span.name in names)

    def _take(self, record: Record) -> None:
        time = record.get("time")
        if time is not None:
            self.first_s = time if self.first_s is None else min(self.first_s, time)
            self.last_s = time if self.last_s is None else max(self.last_s, time)
        if "role" in record:
            self._roles.add(record["role"])
        if record["kind"] == "metrics":
            for key, value in record["values"].items():
                self._samples[record["role"], key].append((record["time"], value))
                if record["step"] >= 0:
                    self._series[key][record["step"]] = value
        elif record["kind"] == "span":
            self.spans.append(Span(record["role"], record["name"], record["start"], record["end"], record["step"]))
        elif record["kind"] == "event":
            self.events[record["name"]].append(record)


def merge_intervals(intervals: Iterable[tuple[float, float]], low: float, high: float) -> np.ndarray:
    """Disjoint, sorted [start, end] rows of the union of the intervals within [low, high]."""
    merged: list[list[float]] = []
    for start, end in sorted((max(start, low), min(end, high)) for start, end in intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, dtype=np.float64).reshape(-1, 2)


def total(intervals: np.ndarray) -> float:
    """Seconds covered by disjoint intervals."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def intersect(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """What two sets of disjoint, sorted intervals have in common."""
    rows, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i, 0], second[j, 0]), min(first[i, 1], second[j, 1])
        if start < end:
            rows.append((start, end))
        if first[i, 1] < second[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(rows, dtype=np.float64).reshape(-1, 2)
