"""metrics.jsonl: what every role says about itself, one JSON object a line, and how to read it back while it grows.

    {"kind": "metrics", "role": "trainer", "time": 1.7e9, "step": 3, "values": {"trainer/loss/mean": 0.1, ...}}
    {"kind": "span",    "role": "trainer", "time": end, "step": 3, "name": "step", "start": 1.7e9, "end": 1.7e9}
    {"kind": "event",   "role": "orchestrator", "time": 1.7e9, "name": "eval", ...}

Several processes append to one file. Each line goes out as a single write on a descriptor opened with O_APPEND, so lines never
interleave. A process that is killed, or a disk that fills up, can leave a torn line: readers skip it and count it.

Times are seconds since the epoch. Values that are not finite are stored as null and read back as NaN.

What this module does not know: what the keys mean (observe.registry), or how they are shown.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from slipstream.errors import StateError
from slipstream.observe import registry

FILE = "metrics.jsonl"

Record = dict[str, Any]
"""One decoded line."""


class MetricsWriter:
    """A role's voice in the run folder. Cheap enough to call every step; safe with many writers; not thread-safe."""

    def __init__(self, run_folder: Path, role: str):
        """`role`: the process's name, such as 'trainer' or 'engine-0'. Its keys start with the part before the dash."""
        self.role = role
        path = Path(run_folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = str(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _ends_in_a_torn_line(path):
            os.write(self._file, b"\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one step. Raises StateError for a key that observe.registry does not define."""
        unknown = [key for key in values if registry.find(key) is None]
        if unknown:
            raise StateError(f"metrics {unknown} are not in slipstream.observe.registry: define them there (unit, healthy range, action)")
        self._append({"kind": "metrics", "step": step, "values": {key: float(value) for key, value in values.items()}})

    def span(self, name: str, start: float, end: float, step: int = -1) -> None:
        """Something that took from `start` to `end` (seconds since the epoch). Step -1: belongs to no step."""
        self._append({"kind": "span", "step": step, "name": name, "start": float(start), "end": float(end)})

    def event(self, name: str, **fields: Any) -> None:
        """Something that happened now, with JSON fields (numpy arrays and scalars are converted)."""
        self._append({"kind": "event", "name": name, **fields})

    def close(self) -> None:
        """Idempotent. Every line is in the file already: there is no buffer."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _append(self, fields: Record) -> None:
        record = {"kind": fields["kind"], "role": self.role, "time": time.time(), **fields}
        line = msgspec.json.encode(record, enc_hook=plain) + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None
        if written != len(line):
            raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes; is the disk full?", self._path)


_FIELDS = {
    "metrics": {"kind", "role", "time", "step", "values"},
    "span": {"kind", "role", "name", "start", "end", "step"},
    "event": {"kind", "name"},
}
"""Fields that readers rely on, by kind of line."""


class MetricsTail:
    """Reads metrics.jsonl from where the last poll ended. A line is returned once it is complete."""

    def __init__(self, run_folder: Path):
        self._path = Path(run_folder) / FILE
        self._offset = 0
        self.unreadable = 0
        """Lines so far that were no record: torn by a crash or a full disk, or without the fields of their kind."""

    def poll(self) -> list[Record]:
        """The lines that have been completed since the last poll, oldest first; [] while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = [self._decode(line) for line in complete.splitlines() if line.strip()]
        return [record for record in records if record is not None]

    def _decode(self, line: bytes) -> Record | None:
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            record = None
        if not isinstance(record, dict) or not _FIELDS.get(str(record.get("kind")), {"kind"}) <= record.keys():
            self.unreadable += 1
            return None
        if record["kind"] == "metrics":
            record["values"] = {key: float("nan") if value is None else value for key, value in record["values"].items()}
        return record


def read_metrics(run_folder: Path) -> list[Record]:
    """Every complete line of a run, oldest first."""
    return MetricsTail(run_folder).poll()


def _ends_in_a_torn_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def counted(prefix: str, counts: Mapping[str, float]) -> dict[str, float]:
    """{'prefix/name': count} for metric keys with a varying last part."""
    return {f"{prefix}/{name}": value for name, value in counts.items()}


def plain(value: Any) -> Any:
    """For msgspec: numpy as lists and numbers, any mapping as an object."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} does not fit a JSON line: use plain JSON values or numpy arrays")
