"""The benchmarks are run by hand and rarely: these hold the parts of them that call into slipstream to its present interfaces."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from benchmarks import _json_task, rl_vs_trl
from benchmarks._runs import run_config

from slipstream.jobs.make_model import make
from slipstream.transport.weights import TENSORS_FILE

NAMES = sorted(file.stem for file in Path(rl_vs_trl.__file__).parent.glob("*.py") if not file.stem.startswith("_"))


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_imports_and_says_what_it_does(name):
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def test_the_score_of_a_snapshot_is_the_share_of_held_out_tasks_it_answers(tmp_path, monkeypatch):
    make(tmp_path / "model", "tiny-moe", ["calculator"], seed=0)
    monkeypatch.setattr(_json_task, "as_json", lambda numbers, symbols: "no such answer")
    config = run_config("bench-vs-trl", tmp_path / "model", rl_vs_trl.SETTINGS)
    assert rl_vs_trl.held_out_success(tmp_path / "model" / TENSORS_FILE, config, tasks=2) == 0.0

    async def right(self, task, messages):
        return 1.0

    monkeypatch.setattr(_json_task.JsonChain, "score", right)
    assert rl_vs_trl.held_out_success(tmp_path / "model" / TENSORS_FILE, config, tasks=2) == 1.0
