"""Training transformers' own modules (`impl = "hf"`): the same step as our family makes, served by the engine, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config import validate
from slipstream.config.train import TrainerConfig
from slipstream.doctor.checks import examine
from slipstream.errors import ConfigError
from slipstream.models.context import FullContext
from slipstream.models.impl import read_spec
from slipstream.models.load import load_model
from slipstream.trainer import progress
from slipstream.trainer.fit import check_trains
from slipstream.trainer.publish import publish
from slipstream.trainer.step import Learner
from slipstream.trainer.team import Team
from tests.unit.engine.helpers import ask, make_engine, prompt, run
from tests.unit.trainer.helpers import make_batch, model_folder, run_config

MIXTRAL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 60,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a family that we have: both implementations run it."""
    return model_folder(tmp_path_factory.mktemp("own") / "model")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    import transformers

    path = tmp_path_factory.mktemp("foreign") / "model"
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL, initializer_range=0.2)).save_pretrained(path)
    return path


def learner(folder: Path, impl: str, **changes) -> Learner:
    config = validate(TrainerConfig, {"row_tokens": 64, "optim": {"lr": 1e-2, "weight_decay": 0.1}, **changes})
    return Learner(load_model(folder, impl=impl), config, config.optim, max_steps=10)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("freeze", [False, True])
def test_steps_equal_those_of_our_own_family(folder, recompute, freeze):
    own, foreign = learner(folder, "auto", freeze_router=freeze), learner(folder, "hf", recompute=recompute, freeze_router=freeze)
    before = {name: tensor.clone() for name, tensor in own.published().items()}
    for step in (1, 2, 3):
        batch = make_batch(step)
        expected, outcome = own.step(batch), foreign.step(batch)
        assert expected.metrics.keys() == outcome.metrics.keys()
        assert outcome.metrics["trainer/replay/coverage_frac"] > 0.5
        for key, value in expected.metrics.items():
            assert outcome.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        np.testing.assert_allclose(outcome.load_LE, expected.load_LE, atol=1e-7)
    expected, found = dict(own.published().items()), dict(foreign.published().items())
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        # Adam divides by the gradient's size: where that is nothing but rounding, the sign is anyone's
        moved, off = (tensor - before[name]).abs().max(), (found[name] - tensor).abs()
        assert off.quantile(0.98) <= 1e-5, name
        assert (moved == 0) == (freeze and name.endswith("mlp.gate.weight")), name


def test_recomputation_gives_the_same_gradients(mixtral):
    kept, recomputed = learner(mixtral, "hf"), learner(mixtral, "hf", recompute="layer")
    for each in (kept, recomputed):
        each.accumulate(make_batch())
    for a, b in zip(kept.weights.parameters, recomputed.weights.parameters, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_bfloat16_keeps_the_table_of_angles_and_trains(mixtral):
    exact, rounded = learner(mixtral, "hf"), learner(mixtral, "hf", dtype="bfloat16")
    compute = rounded.weights.compute
    assert compute is not rounded.weights.master and compute.dtype == torch.bfloat16
    tables = dict(compute.named_buffers())
    assert tables and all(torch.equal(table, dict(exact.weights.master.named_buffers())[name]) for name, table in tables.items())
    losses = [each.step(make_batch()).metrics["trainer/loss/mean"] for each in (exact, rounded)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert all(tensor.dtype == torch.bfloat16 for tensor in dict(rounded.published().items()).values())


def test_a_restored_learner_goes_on_bit_for_bit(mixtral, tmp_path):
    first, second = learner(mixtral, "hf"), learner(mixtral, "hf")
    first.step(make_batch(1))
    with Team(first) as one, Team(second) as two:
        progress.load(two, progress.save(tmp_path, one, progress.Progress(1), ""))
    first.step(make_batch(2))
    second.step(make_batch(2))
    assert all(torch.equal(a, b) for a, b in zip(first.weights.master.parameters(), second.weights.master.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_serves_what_was_published_and_its_routing_is_replayed(mixtral, tmp_path, dtype):
    trained = learner(mixtral, "hf", dtype=dtype)
    engine = make_engine(mixtral, impl="hf", max_running=4, dtype=dtype)
    for step in (1, 2):
        trained.step(make_batch(step))
        engine.prepare(publish(tmp_path, step, trained.published(), None))
        engine.commit(step)
        asked = prompt(step, 11)
        done = run(engine, [ask("r", asked, max_tokens=20)])["r"]
        tokens_T = torch.from_numpy(np.concatenate([asked, done.tokens_N])[:-1].astype(np.int64))
        assert done.routing is not None
        ids_TLK = torch.from_numpy(done.routing.ids_TLK.astype(np.int64))
        context = FullContext([0, len(tokens_T)], ids_TLK, record=True)
        model = trained.weights.compute
        with torch.no_grad():
            logits = model.logits(model(tokens_T, torch.arange(len(tokens_T)), context)).float()
        logprobs_N = logits.log_softmax(-1)[10:].gather(1, torch.from_numpy(done.tokens_N.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(done.logprobs_N, logprobs_N.numpy(), atol=1e-5 if dtype == "float32" else 0.06)
        if dtype == "float32":
            assert torch.equal(context.native_ids_TLK.sort(-1).values, ids_TLK.sort(-1).values)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel": {"processes": 2}}, "trainer.parallel.processes = 2"),
        ({"dtype": "float8"}, 'trainer.dtype = "float8"'),
        ({"optim": {"type": "muon"}}, 'optim.type = "muon"'),
        ({"lora": {"rank": 2}}, "trainer.lora"),
        ({"balance_rate": 1e-3}, "trainer.balance_rate = 0.001"),
    ],
)
def test_settings_that_need_our_own_layers_are_refused_by_name(folder, changes, named):
    config = validate(TrainerConfig, changes)
    with pytest.raises(ConfigError, match=f"{re.escape(named)}.*model.impl"):
        check_trains(config, config.optim, read_spec(folder, "hf"))
    with pytest.raises(ConfigError, match=f"{re.escape(named)}.*model.impl"):
        learner(folder, "hf", **changes)


def test_doctor_says_that_it_has_no_copy_of_other_architectures(mixtral, tmp_path):
    config = run_config(tmp_path / "run", mixtral)
    config = config.replace(model=config.model.replace(impl="hf"))
    with pytest.raises(ConfigError, match=r"impl.*doctor"):
        examine(config)
