"""A reward function that never returns and keeps the interpreter's lock costs seconds and its task, not the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.observe.metrics import read_metrics
from slipstream.observe.rollouts import read_rollouts
from tests.e2e.small import small

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


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_reward_function_that_freezes_the_process_costs_its_task_not_the_run(tmp_path: Path, raw_model: Path, kind: str):
    (tmp_path / "freezing.py").write_text(ENV.format(kind=kind))
    job = replace(small(tmp_path, raw_model), env={"PYTHONPATH": str(tmp_path)})
    text = (tmp_path / "run.toml").read_text()
    text = text.replace('"reverse-text"', '"freezing:Freezing"').replace("filters", "max_freeze_s = 10\nfilters")
    (tmp_path / "run.toml").write_text(text)
    ended = job.rl("--set", "max_steps=6")
    assert ended.returncode == 0, ended.stderr
    assert "orchestrator stood still" in ended.stderr and "Freezing', task freezing:Freezing/train/4" in ended.stderr
    records = read_metrics(job.run)
    assert {r["task"] for r in records if r.get("name") == "frozen"} >= {"freezing:Freezing/train/4"}
    steps = [r["step"] for r in records if r["kind"] == "metrics" and "trainer/loss/mean" in r["values"]]
    assert steps == [1, 2, 3, 4, 5, 6]
    errors = {r["error"] for r in read_rollouts(job.run, outcome="env_error")}
    assert all("stood still" in error for error in errors)
