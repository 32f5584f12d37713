"""Two engine replicas behind the router, and kill -9 of one of them in the middle of a run."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time

import psutil
import pytest

from slipstream.observe.metrics import read_metrics
from tests.e2e.conftest import Job
from tests.waiting import RUN_S

pytestmark = pytest.mark.slow
REPLICAS = 2


def engine_process(supervisor: psutil.Process, replica: int) -> psutil.Process | None:
    """That of one replica; roles name themselves 'slipstream ROLE', and their start had the number."""
    with contextlib.suppress(psutil.Error):
        engines = []
        for child in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if child.cmdline()[0].startswith("slipstream engine"):
                    engines.append(child)
        if len(engines) == REPLICAS:
            return sorted(engines, key=lambda process: process.create_time())[replica]
    return None


def steps_done(job: Job, name: str) -> int:
    with contextlib.suppress(OSError):
        return sum(record["kind"] == "metrics" and record["role"] == "orchestrator" for record in read_metrics(job.runs / name))
    return 0


def test_a_replica_that_is_killed_costs_nothing_but_time(job: Job):
    name = "replicas"
    process = psutil.Popen(
        job.command(name, "--set", "max_steps=30", "--set", f"engine.replicas={REPLICAS}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killed, deadline = 0, time.monotonic() + RUN_S
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        if killed == 0 and steps_done(job, name) >= 5 and (victim := engine_process(process, 1)) is not None:
            victim.send_signal(signal.SIGKILL)
            killed = 1
    assert process.stdout is not None
    with process.stdout as pipe:
        output = pipe.read()
    assert process.returncode == 0, output
    assert killed == 1
    summary = job.summary(name)
    assert summary["ledger_balanced"] is True and summary["steps"] == 30
    assert summary["eval_last"] > 0.75  # the bound of one replica without kills, in test_main_job
    last = [r["values"] for r in read_metrics(job.runs / name) if r["kind"] == "metrics" and r["role"] == "orchestrator"]
    last = [values for values in last if "router/down/count" in values][-1]
    assert last["router/down/count"] >= 1
    assert all(last[f"router/served/engine-{i}"] > 100 for i in range(REPLICAS))
    assert not [key for key in last if key.startswith("router/rejections/") and not key.endswith("/cancelled")]
    assert last["router/tokens/cached"] > 0.3 * last["router/tokens/prompt"]
