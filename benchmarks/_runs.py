"""What the benchmarks of whole runs share: one small warmed-up model, made once, and `slipstream rl` with a run file.

The run is that of configs/quickstart.toml with a few settings replaced. Figures come from the run folder, as for any other run.
Knows nothing of what a benchmark compares.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from slipstream.config import RunConfig, load, to_toml, validate
from slipstream.config.base import merge
from slipstream.observe.history import History
from slipstream.observe.summary import summarise

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
SKIPPED_STEPS = 3
"""First steps of a run, left out of its rates: processes warm up and the pipeline fills."""


def run_config(name: str, model: Path, changes: Mapping[str, Any]) -> RunConfig:
    """The quickstart's run file with another name, model and `changes` (nested tables, merged key by key; lists replace)."""
    base = load(RunConfig, [QUICKSTART]).model_dump(mode="json")
    own = {"name": name, "runs_dir": str(ROOT / "runs"), "model": {"path": str(model)}, "stop_at_eval": None}
    return validate(RunConfig, merge(merge(base, own), changes))


def warm_model() -> Path:
    """models/bench-<fingerprint>-warm: the quickstart's model after its warm-up; made (in minutes) when it is not there."""
    config = load(RunConfig, [QUICKSTART])
    assert config.sft is not None
    tasks = [[env.id, env.args] for env in config.envs]
    made_of = [config.sft.model_dump(mode="json"), tasks, config.trainer.row_tokens, config.model.seq_len]
    fingerprint = xxhash.xxh3_64_hexdigest(json.dumps(made_of, sort_keys=True).encode())[:8]
    warm = ROOT / "models" / f"bench-{fingerprint}-warm"
    if not (warm / "config.json").exists():
        raw = warm.with_name(f"bench-{fingerprint}")
        slipstream("make-model", str(raw), "--preset", "tiny-moe", "--env", config.envs[0].id)
        slipstream("sft", str(QUICKSTART), "--model", str(raw), "--out", str(warm))
    return warm


def launch(config: RunConfig) -> Path:
    """Run `slipstream rl` with this configuration from the start; the run folder. Ends the benchmark when the run fails."""
    file = config.runs_dir / f"{config.name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(config))
    slipstream("rl", str(file), "--clean")
    return config.folder


def slipstream(*args: str) -> None:
    """One command from the root of the repository (so that an environment in `benchmarks` is importable by every role)."""
    print(f"$ slipstream {' '.join(args)}", flush=True)
    result = subprocess.run([sys.executable, "-m", "slipstream.cli", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{result.stdout}\n{result.stderr}\nslipstream {args[0]} ended with exit code {result.returncode}")


def figures(run_folder: Path) -> dict[str, Any]:
    """The run's summary, with rates over the steps after the first `SKIPPED_STEPS`:

    step_s, step_mean_s: seconds from the end of one optimizer step to the end of the next, median and mean.
    samples_per_s: samples trained in these steps by their seconds.
    load_1min: of the machine, when the run had ended; far above the run's own three processes means that figures are not to be trusted.
    """
    history = History(run_folder)
    history.poll()
    ends = sorted(span.end for span in history.find_spans("trainer", "step"))
    _, samples = history.series("trainer/samples/trained")
    if len(ends) < SKIPPED_STEPS + 2:
        sys.exit(f"{run_folder}: {len(ends)} steps are too few; a benchmark needs at least {SKIPPED_STEPS + 2}")
    seconds = [later - earlier for earlier, later in zip(ends[SKIPPED_STEPS - 1 :], ends[SKIPPED_STEPS:], strict=False)]
    return {
        **summarise(run_folder),
        "step_s": statistics.median(seconds),
        "step_mean_s": statistics.mean(seconds),
        "samples_per_s": float(samples[SKIPPED_STEPS:].sum()) / sum(seconds),
        "load_1min": os.getloadavg()[0],
    }
