"""What every benchmark shares: where it ran, what it measured, how it is printed and stored.

A benchmark is a module `benchmarks.NAME` with a `main()` that ends with `finish(...)`: it writes benchmarks/results/NAME.json
(hardware, commit, configuration hash, all runs, medians and spread), prints a table, and as its last line one JSON object with the
headline keys.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Largest minus smallest, relative to the median."""
    return (max(values) - min(values)) / statistics.median(values) if values and statistics.median(values) else 0.0


def finish(
    name: str,
    headline: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    columns: Sequence[str],
    notes: str = "",
) -> None:
    """Print the table of `runs`, write the JSON, print the headline as the last line."""
    console = Console(width=140)
    table = Table(*columns, title=name)
    for run in runs:
        table.add_row(*(_cell(run.get(column)) for column in columns))
    console.print(table)
    if notes:
        console.print(notes, highlight=False)
    RESULTS.mkdir(exist_ok=True)
    record = {
        "name": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "commit": commit(),
        "config_hash": xxhash.xxh3_64_hexdigest(json.dumps(config, sort_keys=True, default=str).encode()),
        "config": dict(config),
        "headline": dict(headline),
        "runs": [dict(run) for run in runs],
        "notes": notes,
    }
    here = f"{Path(__file__).resolve().parents[1]}/"  # paths in the record are relative to the checkout
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1, default=str).replace(here, "") + "\n")
    print(json.dumps(dict(headline), default=str))


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, load: what a reader needs in order to compare."""
    model, flags = platform.processor(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        lines = {key.strip(): value.strip() for key, value in lines.items()}
        model, flags = lines.get("model name", model), lines.get("flags", "")
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags.split()]
    return {
        "cpu": model,
        "isa": wide,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def commit() -> str:
    result = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
