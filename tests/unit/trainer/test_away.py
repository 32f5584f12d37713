"""Moments in files between steps: the same steps, less memory, and checkpoints as ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.config import validate
from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models.load import load_model
from slipstream.trainer.away import Away
from slipstream.trainer.memory import _malloc_trim
from slipstream.trainer.optim import make_optimizer
from slipstream.trainer.step import Learner
from tests.unit.trainer.helpers import make_batch, model_folder


def learner(folder: Path, away: Path | None, **optim) -> Learner:
    values = {"row_tokens": 64, "optim": {"lr": 1e-2, **optim}, "offload": {} if away is None else {"moments": True, "folder": away}}
    config = validate(TrainerConfig, values)
    return Learner(load_model(folder), config, config.optim, max_steps=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("away") / "model")


def resident() -> int:
    """Bytes in memory, files that are mapped included, without what the C library keeps for itself."""
    trim = _malloc_trim()
    assert trim is not None
    trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("optim", [{"type": "muon"}, {"type": "sgd"}, {"type": "sign_sgd"}, {"moments": "bfloat16"}, {"weight_decay": 0.1}])
def test_three_steps_are_those_with_moments_in_memory(folder: Path, tmp_path: Path, optim: dict):
    """Bit for bit where both take our rules; torch's own AdamW rounds otherwise."""
    here, there = learner(folder, None, **optim), learner(folder, tmp_path, **optim)
    for step in (1, 2, 3):
        here.step(make_batch(step))
        there.step(make_batch(step))
    for a, b in zip(here.weights.parameters, there.weights.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6 if "weight_decay" in optim else 0)
    moments = [value for state in there.optimizer.state.values() for key, value in state.items() if value.ndim]
    assert moments and all(bool(value.any()) for value in moments)


def test_memory_holds_the_moments_of_one_parameter_only(tmp_path: Path, monkeypatch):
    size = 16 << 20  # bytes of each of 8 parameters, and of each of their two moments
    params = {f"p{i}": nn.Parameter(torch.ones(size // 4096, 1024)) for i in range(8)}
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer = make_optimizer(params, {}, OptimConfig(), Away(tmp_path))
    before, seen = resident(), []
    keep = Away.keep
    monkeypatch.setattr(Away, "keep", lambda *args: (keep(*args), seen.append(resident() - before)))
    for _ in range(2):
        optimizer.step()
    assert len(seen) == 16 and max(seen) < 4 * size, "all moments together are 16 times as large"
    assert all(float(state["exp_avg"].mean()) == pytest.approx(0.19) for state in optimizer.state.values())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"trainer\.offload\.folder = .*nowhere"):
        learner(folder, tmp_path / "nowhere")
