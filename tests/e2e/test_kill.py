"""kill -9 of each role at random moments, ten times each: the run goes on, every rollout counts once, the result is the same.

Engines come back by themselves (the supervisor starts them again); trainer and orchestrator end the run, and `--resume` goes on.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections import Counter

import psutil
import pytest

from tests.e2e.conftest import Job
from tests.waiting import RUN_S

KILLS = 10
STEPS = 30
pytestmark = pytest.mark.slow


def victim(supervisor: psutil.Process, role: str) -> psutil.Process | None:
    """The process of a role; roles name themselves 'slipstream ROLE' once they have started."""
    with contextlib.suppress(psutil.Error):
        for child in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if child.cmdline()[0].startswith(f"slipstream {role}"):
                    return child
    return None


def run_with_kills(job: Job, name: str, role: str, seed: int) -> int:
    """Run to the end while killing `role` KILLS times at random moments. Returns the number of steps: more on a machine so fast that the
    run ends before the last kill."""
    rng, kills, steps, first = random.Random(seed), 0, STEPS, True
    while True:
        extra = ("--set", f"max_steps={steps}") + (() if first else ("--resume",))
        process = psutil.Popen(job.command(name, *extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        first, deadline = False, time.monotonic() + RUN_S
        while process.poll() is None:
            assert time.monotonic() < deadline, f"no end after {kills} kills"
            found = victim(process, role) if kills < KILLS else None
            if found is None:
                time.sleep(0.05)
                continue
            time.sleep(rng.uniform(0.1, 3.0))
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(signal.SIGKILL)
                kills, deadline = kills + 1, time.monotonic() + RUN_S
        assert process.stdout is not None
        with process.stdout as pipe:
            output = pipe.read()
        if process.returncode == 0 and kills == KILLS:
            return steps
        if process.returncode == 0:
            steps += 10
        else:
            assert "--resume" in output, output


@pytest.mark.parametrize("role", ["trainer", "engine", "orchestrator"])
def test_killed_at_random_moments_the_run_ends_as_if_it_had_not_been(job: Job, role: str):
    name = f"kill-{role}"
    steps = run_with_kills(job, name, role, seed=len(role))
    summary = job.summary(name)
    assert summary["ledger_balanced"] is True and summary["steps"] == steps
    assert summary["lag_max"] <= summary["max_off_policy_steps"]
    trained = job.trained(name)
    assert max(Counter(rollout for rollout, _ in trained).values()) == 1
    assert Counter(step for _, step in trained) == dict.fromkeys(range(1, steps + 1), 64)
    assert summary["eval_last"] > 0.75  # the bound of the run without kills, in test_main_job
