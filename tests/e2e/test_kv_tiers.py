"""A device tier too small for the rollouts of a run: the run is the same but for where its KV lies."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Job

pytestmark = pytest.mark.slow


def engine_values(job: Job, name: str) -> dict[str, float]:
    """The engine's last line of metrics."""
    lines = map(json.loads, (job.runs / name / "metrics.jsonl").read_text().splitlines())
    return [line["values"] for line in lines if line["role"] == "engine-0" and "values" in line][-1]


def test_a_run_on_a_small_device_learns_and_replays_every_row(job: Job, tmp_path):
    tiers = {"ram_mib": 1, "disk_path": tmp_path / "disk", "disk_mib": 64, "min_tokens": 16, "fetch_timeout_s": 60}
    sets = ["max_steps=12", "engine.kv_memory_mib=1", *(f"engine.tiers.{key}={value}" for key, value in tiers.items())]
    result = job.rl("tiered", *(x for s in sets for x in ("--set", s)))
    assert result.returncode == 0, result.stderr
    summary, values = job.summary("tiered"), engine_values(job, "tiered")
    assert summary["ledger_balanced"] is True and summary["steps"] == 12
    assert summary["mismatch_kl_mean"] < 0.05
    assert values["engine/tiers/ram/hit_tokens"] > 0 and values["engine/tiers/disk/hit_tokens"] > 0
    assert values["engine/tiers/disk/damaged"] == 0 and values["engine/tiers/disk/on"] == 1
    lines = map(json.loads, (job.runs / "tiered" / "metrics.jsonl").read_text().splitlines())
    replayed = [v for line in lines if (v := line.get("values", {}).get("trainer/replay/coverage_frac")) is not None]
    assert replayed and min(replayed) > 0.95, "all but the last token of each sample, which is never processed"
