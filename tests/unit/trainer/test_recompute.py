"""Recomputed and offloaded activations change no bit, and take less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.config import validate
from slipstream.config.train import TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models.load import load_model
from slipstream.ops import spill
from slipstream.trainer.step import Learner
from tests.unit.trainer.helpers import make_batch, model_folder


def learner(folder: Path, **trainer) -> Learner:
    config = validate(TrainerConfig, {"row_tokens": 64, "optim": {"lr": 1e-2}, **trainer})
    return Learner(load_model(folder), config, config.optim, max_steps=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("recompute") / "model")


def saved_bytes(subject: Learner) -> int:
    """What autograd keeps for the backward pass of a batch, recomputed parts included when their turn comes."""
    kept = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.nbytes
        return x

    row = max(make_batch().micro_batches, key=lambda row: row.num_tokens)
    from slipstream.models.context import FullContext

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        subject.weights.compute(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), FullContext(row.doc_starts_D))
    return kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{"recompute": "feed_forward"}, {"recompute": "layer"}, {"recompute": "layer", "offload": "files"}])
def test_three_steps_give_the_same_bits(folder: Path, tmp_path: Path, settings: dict, dtype: str):
    if "offload" in settings:
        settings = {**settings, "offload": {"activations": True, "folder": tmp_path, "in_flight": 2}}
    plain, other = learner(folder, dtype=dtype), learner(folder, dtype=dtype, **settings)
    for step in (1, 2, 3):
        a, b = plain.step(make_batch(step)), other.step(make_batch(step))
        assert a.metrics == b.metrics
        assert (a.load_LE == b.load_LE).all()
    assert all(torch.equal(a, b) for a, b in zip(plain.weights.parameters, other.weights.parameters, strict=True))


def test_less_is_kept_the_more_is_recomputed(folder: Path):
    none, feed_forward, layer = (saved_bytes(learner(folder, recompute=what)) for what in ("none", "feed_forward", "layer"))
    assert layer < 0.5 * feed_forward < 0.5 * none


def test_the_input_of_every_layer_of_every_row_is_put_away_and_taken_back(folder: Path, tmp_path: Path, monkeypatch):
    shelves: list[spill.Shelf] = []
    init, take, taken = spill.Shelf.__init__, spill.Shelf.take, []
    monkeypatch.setattr(spill.Shelf, "__init__", lambda self, *args: (init(self, *args), shelves.append(self))[0])
    monkeypatch.setattr(spill.Shelf, "take", lambda self, put: taken.append(put) or take(self, put))
    subject, batch = learner(folder, recompute="layer", offload={"activations": True, "folder": tmp_path}), make_batch()
    subject.step(batch)
    spec = subject.weights.master.spec
    assert shelves[0].bytes_written == 4 * spec.hidden * spec.num_layers * batch.num_tokens
    assert len(taken) == spec.num_layers * len(batch.micro_batches)


def test_offload_without_recomputing_whole_layers_is_refused():
    with pytest.raises(ConfigError, match=r'trainer\.offload\.activations.*set trainer\.recompute = "layer"'):
        validate(TrainerConfig, {"recompute": "feed_forward", "offload": {"activations": True}})


def test_a_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        learner(folder, recompute="layer", offload={"activations": True, "folder": tmp_path / "nowhere"})
