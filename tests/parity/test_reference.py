"""The system against `examples/reference.py`: same data, same seeds: same advantages, losses, gradients and weights.

The reference samples; both train on what it sampled. The system sees it as it would in a run: samples packed into rows, sent through
the wire format, experts replayed, stepped by the trainer.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from slipstream.algorithms.advantages import compute
from slipstream.config import validate
from slipstream.config.train import AdvantageConfig, TrainerConfig
from slipstream.models.load import build_model
from slipstream.orchestrator.pack import make_batch
from slipstream.trainer.step import Learner
from slipstream.transport.codec import decode_batch, encode_batch
from slipstream.types import Batch, Routing, Sample

TRAINER = {"row_tokens": 40, "logprob_chunk_tokens": 16, "optim": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}}
"""eps well above the rounding of a gradient: Adam divides a gradient by its own size, so near 0 it would compare rounding errors."""


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def as_sample(answer, index: int, version: int) -> Sample:
    """What the orchestrator makes of the same rollout."""
    tokens_T = answer.tokens_T.numpy().astype(np.int32)
    sampled_T = np.arange(len(tokens_T)) >= answer.prompt_tokens
    known_T = (answer.routing_TLK >= 0).all(2).all(1).numpy()
    routing = Routing(0, answer.routing_TLK.clamp(min=0).numpy().astype(np.uint8), known_T)
    return Sample(
        rollout_id=f"r{index}",
        group_id="g",
        env="digits",
        tokens_T=tokens_T,
        loss_mask_T=sampled_T,
        logprobs_T=answer.logprobs_T.numpy().astype(np.float32),
        versions_T=np.where(sampled_T, version, -1).astype(np.int32),
        advantage=answer.advantage,
        reward=0.0,
        temperature=answer.temperature,
        routing=(routing,),
    )


def as_batch(step: int, answers: list) -> Batch:
    samples = [as_sample(answer, i, step - 1) for i, answer in enumerate(answers)]
    return decode_batch(b"".join(encode_batch(make_batch(step, samples, TRAINER["row_tokens"], {}))))


def sample_batch(reference: ModuleType, model, step: int) -> list:
    """Twelve answers to questions of several lengths, at two temperatures, with advantages of both signs."""
    random = torch.Generator().manual_seed(step)
    answers = []
    for index in range(12):
        prompt = torch.randint(0, 10, (2 + index % 5,), generator=random).tolist()
        temperature = 1.0 if index % 2 else 0.7
        answer = reference.sample(model, prompt, 3 + index % 4, temperature, random)
        answers.append(replace(answer, advantage=float(torch.randn((), generator=random))))
    return answers


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))


def test_three_steps_of_the_system_are_three_steps_of_the_reference(reference):
    theirs = build_model(reference.TINY_MOE, seed=3)
    optimizer = reference.AdamW(theirs, lr=1e-3, weight_decay=0.1, eps=1e-6)
    config = validate(TrainerConfig, TRAINER)
    system = Learner(build_model(reference.TINY_MOE, seed=3), config, config.optim, max_steps=3)
    for step in (1, 2, 3):
        answers = sample_batch(reference, theirs, step)
        batch = as_batch(step, answers)
        assert len(batch.micro_batches) > 1
        system.accumulate(batch)
        ours = [p.grad.clone() for p in system.weights.master.parameters()]
        outcome = system.step(batch)
        loss, gradients = reference.train_step(theirs, optimizer, answers)
        assert outcome.metrics["trainer/loss/mean"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert max(relative_difference(a, b) for a, b in zip(gradients, ours, strict=True)) < 1e-5
    for a, b in zip(theirs.parameters(), system.weights.master.parameters(), strict=True):
        assert relative_difference(a.detach(), b.detach()) < 1e-5


def test_stale_weights_take_the_same_trust_region(reference):
    """Trained far from the weights that sampled: ratios are extreme, some tokens are masked, and both sides agree."""
    theirs = build_model(reference.TINY_MOE, seed=3)
    answers = sample_batch(reference, build_model(reference.TINY_MOE, seed=4), 1)
    config = validate(TrainerConfig, TRAINER)
    system = Learner(build_model(reference.TINY_MOE, seed=3), config, config.optim, max_steps=1)
    metrics = system.step(as_batch(1, answers)).metrics
    assert metrics["trainer/ratio/masked_frac"] > 0.05
    assert metrics["trainer/loss/mean"] == pytest.approx(float(reference.batch_loss(theirs, answers).detach()), rel=1e-5)


def test_the_first_step_on_fresh_samples_has_no_mismatch(reference):
    theirs = build_model(reference.TINY_MOE, seed=3)
    config = validate(TrainerConfig, TRAINER)
    system = Learner(build_model(reference.TINY_MOE, seed=3), config, config.optim, max_steps=1)
    metrics = system.step(as_batch(1, sample_batch(reference, theirs, 1))).metrics
    assert metrics["trainer/mismatch_kl/fresh"] < 1e-10
    assert metrics["trainer/replay/flip_frac"] == 0.0 and metrics["trainer/ratio/extreme_frac"] == 0.0


def test_advantages_agree(reference):
    rewards = [0.0, 0.5, 1.0, 1.0]
    ours = compute(validate(AdvantageConfig, {}), np.array(rewards, np.float32), np.ones(4, np.int32), 64)
    np.testing.assert_allclose(ours, reference.group_advantages(rewards), rtol=1e-6)


def test_the_reference_stays_readable_in_one_sitting():
    text = (Path(__file__).parents[2] / "examples" / "reference.py").read_text()
    assert len(text.splitlines()) <= 300
