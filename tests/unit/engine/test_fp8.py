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
from slipstream.errors import ConfigError
from slipstream.models.context import FullContext
from slipstream.models.hf import hf_tensors
from slipstream.models.load import build_model, load_model
from slipstream.models.matrices import is_matrix
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


def engine_of(folder: Path, dtype: str, **settings: str) -> EmbeddedEngine:
    config = validate(EngineConfig, {"dtype": dtype, "kv_memory_mib": 4, "max_running": 8, "max_step_tokens": 64, **settings})
    return EmbeddedEngine(folder, config, 64, seed=0)


@torch.no_grad()
def apart(folder: Path, dtype: str, trainer_dtype: str, head_dtype: str = "auto") -> float:
    """Largest difference of a logprob between an engine and a trainer."""
    model = Weights(load_model(folder), validate(TrainerConfig, {"dtype": trainer_dtype})).compute
    differences = []
    for tokens_T, logprobs_N in sampled(engine_of(folder, dtype, head_dtype=head_dtype)):
        ids_T, count = torch.from_numpy(tokens_T).long(), len(tokens_T)
        hidden_TD = model(ids_T, torch.arange(count), FullContext([0, count]))
        wide = head_dtype == "float32"
        logits_TV = torch.mm(hidden_TD.float(), model.head_weight.float().T) if wide else model.logits(hidden_TD).float()
        logprobs_TV = logits_TV.log_softmax(-1)
        own_N = logprobs_TV[-len(logprobs_N) - 1 : -1].gather(1, ids_T[-len(logprobs_N) :, None]).squeeze(1)
        differences.append(float((own_N - torch.from_numpy(logprobs_N)).abs().max()))
    return max(differences)


def test_an_fp8_engine_agrees_with_an_fp8_trainer_and_a_bfloat16_one_does_not(folder: Path):
    assert apart(folder, "float8", "float8") < 0.3 * apart(folder, "bfloat16", "float8")


@pytest.mark.parametrize("head_dtype", ["auto", "float32"])
def test_where_no_rounding_differs_they_agree_to_the_last_bits(folder: Path, head_dtype: str):
    """k3 of a difference d is about d² / 2: below 1e-4 it is below 1e-8."""
    assert apart(folder, "float8", "float8", head_dtype) < 1e-4


def test_a_head_in_float32_rounds_no_logits(folder: Path):
    """Logits that are rounded to bfloat16 have 8 bits; logprobs differ by more than the last bits of float32 then."""
    (tokens_T, rounded_N), (same_T, wide_N) = (sampled(engine_of(folder, "bfloat16", head_dtype=h))[0] for h in ("auto", "float32"))
    model, at = load_model(folder, torch.bfloat16), slice(len(same_T) - len(wide_N) - 1, len(same_T) - 1)
    with torch.no_grad():
        hidden_ND = model(torch.from_numpy(same_T).long(), torch.arange(len(same_T)), FullContext([0, len(same_T)]))[at]
        exact_NV = (hidden_ND.float() @ model.head_weight.float().T).log_softmax(-1)
    exact_N = exact_NV.gather(1, torch.from_numpy(same_T).long()[at.start + 1 :, None]).squeeze(1).numpy()
    assert np.abs(wide_N - exact_N).max() < 1e-5 and np.abs(rounded_N[0] - exact_N[0]) > 1e-4
    assert tokens_T[0] == same_T[0]


def test_weights_take_half_the_memory_also_of_the_next_version(folder: Path, tmp_path: Path):
    """But for embedding and norms, that are not in FP8."""
    sizes = {dtype: engine_of(folder, dtype).weight_bytes for dtype in ("float32", "bfloat16", "float8")}
    spec = load_model(folder).spec
    matrices = sum(t.numel() for name, t in hf_tensors(load_model(folder)).items() if is_matrix(name))
    assert sizes["float32"] == 2 * sizes["bfloat16"] == 4 * spec.num_params
    scales = sizes["float8"] - (2 * spec.num_params - matrices)
    assert 0 < scales < 0.02 * matrices
    engine = engine_of(folder, "float8")
    for number in (1, 2, 3):
        trained = build_model(spec, torch.bfloat16, seed=number)
        engine.prepare(publish(tmp_path / "weights", number, TensorStream.of(hf_tensors(trained)), None))
        engine.commit(number)
        assert engine.weight_bytes == 2 * sizes["float8"]
    assert 0.9 < engine.kv_bytes / (4 * 2**20) < 1.01  # who wrote a block is beside it


def test_transformers_own_modules_are_refused(folder: Path):
    with pytest.raises(ConfigError, match=r'engine\.dtype = "float8" and model\.impl = "hf"'):
        EmbeddedEngine(folder, EngineConfig(dtype="float8"), 64, impl="hf")


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
