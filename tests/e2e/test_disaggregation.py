"""A run with one prefill and one decode engine goes on when the prefill engine is killed, and uses it again when it is back."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from slipstream.observe.metrics import read_metrics
from tests.e2e.small import Small, small
from tests.waiting import RUN_S, wait_until

pytestmark = pytest.mark.slow
SETS = {
    "max_steps": 100_000,
    "orchestrator.max_off_policy_steps": 8,  # what is asked of a stopped engine goes on for a while
    "engine.replicas": 2,
    "engine.block_tokens": 4,
    "engine.disaggregation.prefill_replicas": 1,
    "engine.disaggregation.timeout_s": 10,
    "router.prefill": "always",
}


def received(job: Small, key: str) -> list[float]:
    """What the decode engine has counted, over time, from 0."""
    return [0.0, *(r["values"][key] for r in read_metrics(job.run) if r["role"] == "engine-0" and key in r.get("values", {}))]


def test_a_run_with_a_prefill_engine_survives_its_death(tmp_path: Path, raw_model: Path):
    job = small(tmp_path, raw_model)
    command = job.command(*(x for key, value in SETS.items() for x in ("--set", f"{key}={value}")))
    with (tmp_path / "said").open("wb") as said:
        process = psutil.Popen(command, stdout=said, stderr=said)
        try:
            killed = kill_once_it_has_served(job, process)
            wait_until(lambda: received(job, "engine/handoff/tokens")[-1] > killed or process.poll() is not None, RUN_S)
            assert process.poll() is None, (tmp_path / "said").read_text()
            process.terminate()
            process.wait(RUN_S)
            assert "interrupted; everything was stopped in order" in (tmp_path / "said").read_text()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    records = read_metrics(job.run)
    steps = [r["step"] for r in records if "trainer/loss/mean" in r.get("values", {})]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 5
    for values in (r["values"] for r in records if "trainer/replay/coverage_frac" in r.get("values", {})):
        tokens = values["trainer/tokens/trained"]  # the last token of each of 16 samples was never processed, so it has no row
        assert values["trainer/replay/coverage_frac"] == pytest.approx(1 - 16 / tokens)
    assert received(job, "engine/handoff/failures")[-1] >= 1  # those that were under way
    assert received(job, "engine/handoff/tokens")[-1] > killed > 0  # before it died, and after it was back
    log = (job.run / "logs" / "engine-0.log").read_text()
    assert "prompts are computed here until it serves again" in log and "Traceback" not in log


def kill_once_it_has_served(job: Small, process: psutil.Popen) -> float:
    """kill -9 the prefill engine in the middle of handoffs; the tokens that had come from it by then."""
    wait_until(lambda: received(job, "engine/handoff/tokens")[-1] > 0 or process.poll() is not None, RUN_S)
    assert process.poll() is None, "the run has ended before a token came from the prefill engine"
    engine = json.loads((job.run / "endpoints" / "engine-1.json").read_text())
    assert engine["role"] == "prefill"
    os.kill(engine["pid"], signal.SIGSTOP)
    time.sleep(3)  # what is asked of it meanwhile is under way when it dies
    tokens = received(job, "engine/handoff/tokens")[-1]
    os.kill(engine["pid"], signal.SIGKILL)
    return tokens
