"""Two engine processes that share the experts, in a real run: replay on, one of them is killed, both come back with the current weights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from slipstream.observe.metrics import read_metrics
from tests.e2e.conftest import slipstream
from tests.e2e.small import Small, small
from tests.waiting import HUNG_S, RUN_S, wait_until

WIDE = ("engine.replicas=2", "engine.ep={ranks = 2, redundant_experts = 1, rebalance_steps = 50}", "engine.on_update=recompute")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("wide")
    assert slipstream("make-model", folder / "model", "--env", "reverse-text").returncode == 0
    return small(folder, folder / "model")


def sets(*values: str) -> list[str]:
    return [part for value in (*WIDE, *values) for part in ("--set", value)]


def last(run: Path, role: str) -> dict[str, float]:
    return [line["values"] for line in read_metrics(run) if line["kind"] == "metrics" and line["role"] == role][-1]


def every(run: Path, key: str) -> list[float]:
    return [line["values"][key] for line in read_metrics(run) if line["kind"] == "metrics" and key in line["values"]]


@pytest.mark.slow
def test_a_run_with_shared_experts_trains_on_exact_logprobs_and_survives_the_death_of_a_rank(job: Small):
    process = subprocess.Popen(job.command(*sets("max_steps=10")), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: (job.run / "weights" / "v000004").exists() or process.poll() is not None, RUN_S)
    victim = json.loads((job.run / "endpoints" / "engine-1.json").read_text())["pid"]
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, output
    assert "engine-1 was killed by SIGKILL; starting it and the rest of engines-0 again" in output
    assert output.count("starting it") == 1, "the others are ended with it, and are not one death more"
    fresh = every(job.run, "trainer/mismatch_kl/fresh")
    assert fresh and max(fresh) < 1e-9, "a rank sampled from other weights than it said, or a layer mixed two versions"
    for role in ("engine-0", "engine-1"):
        values = last(job.run, role)
        assert values["engine/version/live"] >= 6 and values["engine/ep/served_pairs"] > 0 and values["engine/ep/dispatch_s/0"] > 0
    assert min(every(job.run, "trainer/replay/coverage_frac")) > 0.9


@pytest.mark.slow
def test_a_model_folder_is_served_by_several_processes_that_share_its_experts(job: Small):
    command = [sys.executable, "-m", "slipstream.cli", "engine", "--model", str(job.folder / "model"), "--ranks", "2"]
    output, deadline = job.folder / "served", time.monotonic() + RUN_S
    with output.open("w") as file:
        process = subprocess.Popen([*command, "--set", "kv_memory_mib=8"], stdout=file, stderr=file)
    try:
        urls: list[str] = []
        while len(urls) < 2:
            assert time.monotonic() < deadline and process.poll() is None, output.read_text()
            time.sleep(0.2)
            urls = re.findall(r"serving .* at (\S+)/v1", output.read_text())
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
        answers = []
        for url in urls:
            with urllib.request.urlopen(f"{url}/v1/completions", json.dumps(body).encode(), timeout=HUNG_S) as response:
                answers.append(json.load(response)["choices"][0]["text"])
        assert answers[0] == answers[1]
    finally:
        process.terminate()
        process.wait(HUNG_S)
