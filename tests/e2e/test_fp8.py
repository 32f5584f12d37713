"""The main job with everything in FP8 that can be: published weights, the engine's products, its cache; and experts replayed."""

from __future__ import annotations

import pytest

from slipstream.observe.metrics import read_metrics
from slipstream.transport.weights import TENSORS_FILE, list_versions, read_header, version_folder
from tests.e2e.conftest import Job

pytestmark = pytest.mark.slow
SETTINGS = ("engine.dtype=float8", "engine.kv_dtype=float8", "trainer.dtype=bfloat16", "trainer.publish=float8", "max_steps=20")


def test_rewards_rise_with_weights_that_travel_and_stay_in_fp8(job: Job):
    result = job.rl("fp8", *(part for setting in SETTINGS for part in ("--set", setting)))
    assert result.returncode == 0, result.stderr
    summary = job.summary("fp8")
    assert summary["ledger_balanced"] is True and summary["steps"] == 20
    assert summary["eval_last"] > summary["eval_first"] + 0.2
    assert summary["mismatch_kl_mean"] < 0.05
    folder = job.runs / "fp8"
    kinds = [entry.dtype for entry in read_header(version_folder(folder / "weights", list_versions(folder / "weights")[-1]) / TENSORS_FILE)]
    assert {"F8_E4M3", "BF16", "F32"} == set(kinds) and kinds.count("F8_E4M3") == kinds.count("F32")
    assert {"BF16"} == {entry.dtype for entry in read_header(folder / "final" / TENSORS_FILE)}
    values = [line["values"] for line in read_metrics(folder) if line["kind"] == "metrics"]
    assert min(v["trainer/replay/coverage_frac"] for v in values if "trainer/replay/coverage_frac" in v) > 0.9
    engine = [v["engine/memory/weight_mib"] for v in values if "engine/memory/weight_mib" in v]
    assert 0 < max(engine) < 2 * (folder / "final" / TENSORS_FILE).stat().st_size / 2**20 * 0.6
