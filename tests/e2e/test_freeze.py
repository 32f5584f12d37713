"""A reward function that never returns and keeps the interpreter's lock costs seconds and its task, not the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.observe.metrics import read_metrics
from slipstream.observe.rollouts import read_rollouts
from tests.e2e.conftest import slipstream

pytestmark = pytest.mark.slow

ENV = """
import re
from slipstream.envs.reverse_text import ReverseText

class Freezing(ReverseText):
    def num_tasks(self, split):
        return 6

    {kind} score(self, task, messages):
        if task.index == 4:
            re.match(r"(a+)+$", "a" * 60 + "b")
        return len(set(messages[-1]["content"])) / 100
"""

RUN_FILE = """
max_steps = 6
[model]
path = "{model}"
seq_len = 96
[engine]
kv_memory_mib = 8
[trainer]
row_tokens = 256
[orchestrator]
batch = {{ type = "samples", samples = 16 }}
concurrency = {{ initial = 16, min = 4, max = 16 }}
max_freeze_s = 3
[[envs]]
id = "freezing:Freezing"
group_size = 4
sampling = {{ max_tokens = 16 }}
[eval]
tasks = 0
"""


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_reward_function_that_freezes_the_process_costs_its_task_not_the_run(tmp_path: Path, kind: str):
    made = slipstream("make-model", tmp_path / "model", "--env", "reverse-text")
    assert made.returncode == 0, made.stderr
    (tmp_path / "freezing.py").write_text(ENV.format(kind=kind))
    config = tmp_path / "run.toml"
    config.write_text(RUN_FILE.format(model=tmp_path / "model"))
    command = [sys.executable, "-m", "slipstream.cli", "rl", str(config), "--set", "name=r", "--set", f"runs_dir={tmp_path}"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "orchestrator stood still" in ended.stderr and "Freezing', task freezing:Freezing/train/4" in ended.stderr
    records = read_metrics(tmp_path / "r")
    assert {r["task"] for r in records if r.get("name") == "frozen"} >= {"freezing:Freezing/train/4"}
    steps = [r["step"] for r in records if r["kind"] == "metrics" and "trainer/loss/mean" in r["values"]]
    assert steps == [1, 2, 3, 4, 5, 6]
    errors = {r["error"] for r in read_rollouts(tmp_path / "r", outcome="env_error")}
    assert all("stood still" in error for error in errors)
