"""Loss-free balancing: the routing bias evens the load out, learns from this router's own choice, and is part of all that is stored."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config import validate
from slipstream.config.train import TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models import hf
from slipstream.models.load import load_model
from slipstream.trainer.step import Learner
from slipstream.transport.weights import version_folder
from tests.unit.trainer.helpers import make_batch, model_folder, without_routing
from tests.unit.trainer.test_rl import fingerprints, whole_and_resumed

GLM = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
}
STEPS, RATE = 50, 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("glm"), **GLM)


def learner(folder: Path, **changes) -> Learner:
    config = validate(TrainerConfig, {"row_tokens": 64, "optim": {"lr": 1e-3}, **changes})
    return Learner(load_model(folder), config, config.optim, max_steps=STEPS)


def biases(subject: Learner) -> torch.Tensor:
    return torch.stack([layer.ffn.router_bias for layer in subject.weights.master.layers]).clone()


@torch.no_grad()
def skew(subject: Learner, seed: int) -> None:
    """All tokens share a direction, and two experts of each layer like it."""
    model = subject.weights.master
    direction_D = torch.randn(model.spec.hidden, generator=torch.Generator().manual_seed(seed))
    model.embed += direction_D
    for layer in model.layers:
        layer.ffn.router[:, seed : seed + 2] += (0.6 * direction_D / direction_D.norm()).unsqueeze(1)


def imbalances(folder: Path, seed: int, rate: float) -> list[float]:
    subject = learner(folder, balance_rate=rate)
    skew(subject, seed)
    batches = [without_routing(make_batch(step, num_samples=24, seed=seed)) for step in range(1, STEPS + 1)]
    return [subject.step(batch).metrics["trainer/balance/imbalance"] for batch in batches]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_load_of_a_skewed_router_evens_out_with_balancing_and_stays_skewed_without(folder, seed):
    with_it, without_it = imbalances(folder, seed, RATE), imbalances(folder, seed, 0.0)
    assert with_it[0] == without_it[0] > 2
    assert np.mean(with_it[-10:]) < 0.5 * with_it[0]
    assert np.mean(without_it[-10:]) > 0.9 * without_it[0]


def test_each_step_moves_every_bias_by_the_rate_against_its_load(folder):
    subject = learner(folder, balance_rate=RATE)
    _, routing = learner(folder).accumulate(make_batch())
    subject.step(make_batch())
    mean_L1 = routing.native_LE.mean(1, keepdims=True)
    np.testing.assert_allclose(biases(subject), RATE * np.sign(mean_L1 - routing.native_LE), rtol=1e-6)
    assert {-1, 1} <= set(np.sign(mean_L1 - routing.native_LE).ravel().astype(int))


def test_the_bias_follows_what_the_router_would_choose_now_not_what_was_forced(folder):
    batch = make_batch()
    forced = [replace(row, routing_TLK=np.tile(np.uint8([0, 1]), (row.num_tokens, 2, 1))) for row in batch.micro_batches]
    forced = replace(batch, micro_batches=tuple(replace(row, routing_valid_T=np.ones(row.num_tokens, bool)) for row in forced))
    subject, native = learner(folder, balance_rate=RATE), learner(folder, balance_rate=RATE)
    outcome = subject.step(forced)
    assert (outcome.load_LE[:, 2:] == 0).all()
    native.step(without_routing(batch))
    # forced ids change what the second layer sees, the first layer's router sees the same
    assert torch.equal(biases(subject)[0], biases(native)[0]) and (biases(subject)[:, 2:] < 0).any()


def test_a_skipped_step_moves_no_bias_and_a_rate_of_zero_neither(folder):
    batch = make_batch()
    rows = tuple(replace(row, advantages_T=np.full_like(row.advantages_T, np.nan)) for row in batch.micro_batches)
    subject, off = learner(folder, balance_rate=RATE), learner(folder)
    assert subject.step(replace(batch, micro_batches=rows)).problem
    off.step(batch)
    assert not biases(subject).any() and not biases(off).any()


def test_a_model_without_a_routing_bias_cannot_be_balanced_so(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.balance_rate = 0\.001.*qwen3_moe"):
        learner(model_folder(tmp_path), balance_rate=1e-3)


def test_balancing_and_a_frozen_router_contradict_one_another(folder):
    with pytest.raises(ConfigError, match=r"balance_rate = 0\.01.*freeze_router"):
        learner(folder, balance_rate=RATE, freeze_router=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bias_is_published_in_float32_and_survives_a_resume_bit_for_bit(tmp_path, folder, dtype):
    trainer = {"balance_rate": 1e-3, "dtype": dtype}
    whole, resumed = whole_and_resumed(tmp_path, folder, trainer)
    assert fingerprints(resumed) == fingerprints(whole)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    published = [hf.read_tensors(version_folder(whole / "weights", version))[name] for version in range(5)]
    assert not published[0].any()
    for before, after in pairwise(published):
        assert after.dtype == torch.float32
        steps_E = ((after - before) / 1e-3).numpy()
        np.testing.assert_allclose(steps_E, steps_E.round(), atol=1e-3)
        assert set(steps_E.round().astype(int)) <= {-1, 0, 1} and steps_E.any()
    assert torch.equal(hf.read_tensors(whole / "final")[name], published[-1])
