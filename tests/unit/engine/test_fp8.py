"""An engine in float8 multiplies the codes that an FP8 trainer multiplies, also of versions that come later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config import validate
from slipstream.config.serve import EngineConfig
from slipstream.config.train import TrainerConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.weights import LiveWeights
from slipstream.models.context import FullContext
from slipstream.models.hf import hf_tensors
from slipstream.models.load import build_model, load_model
from slipstream.models.tensor_file import TensorStream
from slipstream.ops.fp8_weight import Fp8Weight
from slipstream.trainer.precision import Weights
from slipstream.trainer.publish import publish
from slipstream.types import GenerateRequest, Sampling
from tests.unit.trainer.helpers import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("fp8") / "model")


def sampled(engine: EmbeddedEngine) -> list[tuple[np.ndarray, np.ndarray]]:
    """(all tokens, logprobs of those that were sampled) of eight requests."""
    prompts = {f"r{i}": np.arange(2, 5 + i).astype(np.int32) for i in range(8)}
    for name, prompt_T in prompts.items():
        engine.add(GenerateRequest(name, prompt_T, Sampling(max_tokens=12, seed=1)))
    done = []
    while engine.has_work:
        done += engine.step().finished
    done.sort(key=lambda completion: completion.id)
    return [(np.concatenate([prompts[c.id], c.tokens_N]), c.logprobs_N) for c in done]


def engine_of(folder: Path, dtype: str) -> EmbeddedEngine:
    config = validate(EngineConfig, {"dtype": dtype, "kv_memory_mib": 4, "max_running": 8, "max_step_tokens": 64})
    return EmbeddedEngine(folder, config, 64, seed=0)


@torch.no_grad()
def apart(folder: Path, dtype: str, trainer_dtype: str) -> float:
    """Largest difference of a logprob between an engine and a trainer."""
    model = Weights(load_model(folder), validate(TrainerConfig, {"dtype": trainer_dtype})).compute
    differences = []
    for tokens_T, logprobs_N in sampled(engine_of(folder, dtype)):
        ids_T, count = torch.from_numpy(tokens_T).long(), len(tokens_T)
        hidden_TD = model(ids_T, torch.arange(count), FullContext([0, count]))
        logprobs_TV = model.logits(hidden_TD).float().log_softmax(-1)
        own_N = logprobs_TV[-len(logprobs_N) - 1 : -1].gather(1, ids_T[-len(logprobs_N) :, None]).squeeze(1)
        differences.append(float((own_N - torch.from_numpy(logprobs_N)).abs().max()))
    return max(differences)


def test_an_fp8_engine_agrees_with_an_fp8_trainer_and_a_bfloat16_one_does_not(folder: Path):
    assert apart(folder, "float8", "float8") < 0.3 * apart(folder, "bfloat16", "float8")


def test_a_version_that_comes_later_is_quantised_as_a_fresh_engine_would(folder: Path, tmp_path: Path):
    trained = build_model(load_model(folder).spec, torch.bfloat16, seed=5)
    version = publish(tmp_path / "weights", 1, TensorStream.of(hf_tensors(trained)), None)
    live = LiveWeights(folder, torch.bfloat16, 0, fp8="float32")
    first = {name: weight.parts for name, weight in live.model.named_parameters() if isinstance(weight, Fp8Weight)}
    live.prepare(version)
    live.commit(1)
    weights = {name: weight for name, weight in live.model.named_parameters() if isinstance(weight, Fp8Weight)}
    assert weights.keys() == first.keys() and len(weights) == 8
    expected = Weights(build_model(trained.spec, seed=5), validate(TrainerConfig, {"dtype": "float8"})).compute
    for name, weight in weights.items():
        for mine, other in zip(weight.parts, expected.get_parameter(name).parts, strict=True):
            assert torch.equal(mine.codes.view(torch.uint8), other.codes.view(torch.uint8)) and torch.equal(mine.scales, other.scales)
        assert not torch.equal(weight.parts[0].codes.view(torch.uint8), first[name][0].codes.view(torch.uint8))
