"""SFT: the loss is the mean negative log-likelihood of the masked tokens, and it falls."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.models.context import FullContext
from slipstream.models.load import load_model
from slipstream.trainer.sft import demonstration_batch, draws, train
from tests.unit.trainer.helpers import model_folder, run_config


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def demonstrations(count: int = 16) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counting upwards from a given token: easy to learn."""
    rng = np.random.default_rng(0)
    starts, lengths = rng.integers(0, 20, count), rng.integers(5, 15, count)
    return [((s + np.arange(n)).astype(np.int32), np.arange(n) >= 2) for s, n in zip(starts, lengths, strict=True)]


def test_the_loss_of_the_first_step_is_the_mean_negative_log_likelihood_of_the_masked_tokens(tmp_path, model):
    samples = demonstrations(8)
    config = run_config(tmp_path / "run", model, sft={"steps": 1, "samples_per_step": 8})
    loss = train(model, samples, config, tmp_path / "out")["loss"]
    policy, total, count = load_model(model), 0.0, 0
    for tokens, mask in samples:
        t = torch.tensor(tokens).long()
        logprobs = policy.logits(policy(t, torch.arange(len(t)), FullContext([0, len(t)]))).detach().log_softmax(-1)
        at = np.flatnonzero(mask)
        total -= float(logprobs[at - 1, t[at]].sum())
        count += len(at)
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_the_loss_falls_and_the_result_is_a_model_folder(tmp_path, model):
    losses = []
    config = run_config(tmp_path / "run", model, sft={"steps": 30, "samples_per_step": 16, "optim": {"lr": 2e-2}})
    metrics = train(model, demonstrations(), config, tmp_path / "out", on_step=lambda step, values: losses.append((step, values["loss"])))
    assert [step for step, _ in losses] == list(range(1, 31))
    assert losses[-1][1] < 0.4 * losses[0][1]
    assert metrics["tokens_per_s"] > 0
    assert load_model(tmp_path / "out").spec == load_model(model).spec


def test_the_same_seed_gives_the_same_model(tmp_path, model):
    config = run_config(tmp_path / "run", model, sft={"steps": 2, "samples_per_step": 4})
    train(model, demonstrations(), config, tmp_path / "a")
    train(model, demonstrations(), config, tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_every_epoch_draws_every_sample_once_in_another_order():
    drawn = [index for batch in islice(draws(10, 4, seed=0), 5) for index in batch]
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert all(len(batch) == 25 for batch in islice(draws(10, 25, seed=0), 3))


def test_a_demonstration_batch_holds_every_token_once(model):
    samples = demonstrations()
    batch = demonstration_batch(1, samples, row_tokens=64)
    tokens = sorted(t for row in batch.micro_batches for t in row.tokens_T.tolist())
    assert tokens == sorted(t for sample, _ in samples for t in sample.tolist())
    assert batch.loss_tokens == sum(mask.sum() for _, mask in samples)
    for row in batch.micro_batches:
        assert (row.positions_T[row.doc_starts_D[:-1]] == 0).all() and row.num_tokens <= 64


def test_missing_tables_and_demonstrations_are_the_users_mistakes(tmp_path, model):
    with pytest.raises(ConfigError, match=r"no \[sft\] table"):
        train(model, demonstrations(), run_config(tmp_path / "run", model), tmp_path / "out")
    config = run_config(tmp_path / "run", model, sft={})
    with pytest.raises(ConfigError, match="no demonstrations"):
        train(model, [], config, tmp_path / "out")
    long = (np.zeros(65, dtype=np.int32), np.arange(65) > 0)
    with pytest.raises(ConfigError, match=r"65 tokens and trainer\.row_tokens = 64"):
        train(model, [long], config, tmp_path / "out")
