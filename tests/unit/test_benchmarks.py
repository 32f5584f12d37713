"""The benchmarks are run by hand and rarely: these hold the parts of them that call into slipstream to its present interfaces."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from benchmarks import _json_task, parity_families, rl_vs_trl
from benchmarks._runs import run_config

from slipstream.jobs.make_model import make
from slipstream.models import hf
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


def test_a_family_that_agrees_with_transformers_has_a_clean_row():
    row = parity_families.shape_row("glm4_moe-grouped", seeds=1)
    assert (row["family"], row["shape"], row["round_trip"], row["decode"]) == ("glm4_moe", "grouped", True, True)
    assert row["decoded"] > 50 and row["logit_std"] > 0.3
    assert all(0 < row[key] < 1e-5 for key in parity_families.WORST)


def test_the_parity_figures_see_one_weight_that_was_read_wrongly(monkeypatch):
    load = parity_families.load_model

    def load_wrongly(folder):
        model = load(folder)
        model.get_parameter("layers.1.attention.qkv").data[3, 5] += 0.01
        return model

    monkeypatch.setattr(parity_families, "load_model", load_wrongly)
    row = parity_families.shape_row("qwen3", seeds=1)
    assert row["logit_diff"] > 1e-4 and row["grad_diff"] > 1e-5 and row["grad_rel"] > 1e-3
    assert not row["round_trip"] and row["decode"]


def test_the_parity_figures_see_an_engine_with_other_weights(tmp_path, monkeypatch):
    make_engine = parity_families.make_engine

    def make_wrong_engine(folder):
        tensors = hf.read_tensors(folder)
        tensors["model.norm.weight"][0] += 0.5
        hf.write_tensors(folder, tensors)
        return make_engine(folder)

    monkeypatch.setattr(parity_families, "make_engine", make_wrong_engine)
    row = parity_families.shape_row("minimax_m2", seeds=1)
    assert row["decode_diff"] > 1e-3 and row["round_trip"] and row["logit_diff"] < 1e-5
    assert not parity_families.headline([{**row, "decode": False}])["decode"]
