"""The fused step in bfloat16 against the model's own forward pass, which the trainer runs as well: it must round where that rounds.

Sums are taken in another order on some processors, so a value on the border between two bf16 numbers may fall to the other side: rare at
first, and more with every layer behind it. A forgotten rounding changes most values of the next tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.engine import runner
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.fused import bind
from slipstream.engine.kv import KvCache
from slipstream.models import hf
from slipstream.models.fp8 import load_in_fp8
from slipstream.models.load import build_model, load_model
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec
from tests.unit.engine.helpers import ask, make_engine, prompt, run, write_model

BORDERLINE = 0.03
"""Share of keys and values that may differ in the second layer. A forgotten rounding: 0.2 and more."""
FAMILIES = {
    "moe": {"moe": True, "mlp_only_layers": []},
    "unnormalised": {"moe": True, "mlp_only_layers": [], "norm_topk_prob": False, "num_experts_per_tok": 3},
    "dense": {"moe": False},
    "biased": {"moe": False, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True},
    "tied": {"moe": True, "tie_word_embeddings": True, "vocab_size": 64},
}


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path) -> Path:
    return write_model(tmp_path / "model", **{"num_hidden_layers": 2, **FAMILIES[request.param]})


def served(folder: Path, monkeypatch, fused: bool, **config) -> tuple[EmbeddedEngine, torch.Tensor]:
    """An engine that has served twelve prompts in one step, and the logits behind them."""
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(runner, "bind", lambda *args: None)
        engine = make_engine(folder, dtype="bfloat16", max_step_tokens=1024, kv_memory_mib=4, **config)
        logits = kept_logits(engine)
        run(engine, [ask(f"r{i}", prompt(i, 3 + 5 * i), max_tokens=1) for i in range(12)])
    assert (engine._runner._fused is not None) == fused
    return engine, torch.cat(logits)


def kept_logits(engine: EmbeddedEngine) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    step: Callable[..., torch.Tensor] = engine._runner.run

    def run_and_keep(*args) -> torch.Tensor:
        logits_SV = step(*args)
        kept.append(logits_SV.clone())  # the sampler overwrites them
        return logits_SV

    engine._runner.run = run_and_keep
    return kept


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Share of the values other than 0."""
    return float((ours != theirs).sum() / (theirs != 0).sum())


@pytest.mark.parametrize("head_dtype", ["auto", "float32"])
def test_it_rounds_where_the_models_own_forward_pass_rounds(folder, monkeypatch, head_dtype):
    (fused, fused_logits), (own, own_logits) = (served(folder, monkeypatch, way, head_dtype=head_dtype) for way in (True, False))
    for layer in range(2):
        for ours, theirs in zip(fused._cache.parts(layer), own._cache.parts(layer), strict=True):
            assert ours.dtype is torch.bfloat16
            assert differing(ours, theirs) < BORDERLINE
    assert np.mean(fused._cache.routing != own._cache.routing) < 0.01 if own._cache.routing.size else True
    assert fused.expert_load.sum() == own.expert_load.sum()
    torch.testing.assert_close(fused_logits, own_logits, rtol=0, atol=0.02)


def test_logits_are_rounded_to_bfloat16_unless_the_head_is_wide(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", **{"num_hidden_layers": 2, **FAMILIES["tied"]})
    rounded, wide = (served(folder, monkeypatch, True, head_dtype=head_dtype)[1] for head_dtype in ("auto", "float32"))
    assert torch.equal(rounded, wide.bfloat16().float())
    assert differing(rounded, wide) > 0.9


@pytest.mark.parametrize("preset", ["tiny-moe", "small-moe", "tiny-dense"])
def test_presets_are_served_as_by_their_own_forward_pass(preset, tmp_path, monkeypatch):
    folder = tmp_path / preset
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**PRESETS[preset], "num_hidden_layers": 2, "vocab_size": 64, "eos_token_id": None}))
    hf.write_tensors(folder, hf.hf_tensors(build_model(ModelSpec.from_folder(folder), seed=0)))
    (fused, fused_logits), (own, own_logits) = (served(folder, monkeypatch, way) for way in (True, False))
    for ours, theirs in zip(fused._cache.parts(1), own._cache.parts(1), strict=True):
        assert differing(ours, theirs) < BORDERLINE
    torch.testing.assert_close(fused_logits, own_logits, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "config", [{"max_running": 1}, {"max_running": 7, "max_step_tokens": 7}, {"max_running": 3, "max_step_tokens": 24}]
)
def test_a_tokens_result_does_not_depend_on_the_rest_of_the_batch(folder, config):
    requests = [ask(f"r{i}", prompt(i, 1 + 7 * i), max_tokens=9, temperature=1.0, seed=i) for i in range(10)]
    together = run(make_engine(folder, dtype="bfloat16"), requests)
    engine = make_engine(folder, dtype="bfloat16", **config)
    for name, done in run(engine, requests).items():
        assert done.tokens_N.tolist() == together[name].tokens_N.tolist()
        np.testing.assert_array_equal(done.logprobs_N, together[name].logprobs_N)
        if done.routing is not None:
            np.testing.assert_array_equal(done.routing.ids_TLK, together[name].routing.ids_TLK)
    assert engine._runner._fused is not None


def test_it_serves_neither_a_cache_of_another_type_nor_weights_in_fp8(tmp_path):
    folder = write_model(tmp_path / "model", **FAMILIES["moe"])
    half, whole, fp8 = load_model(folder, torch.bfloat16), load_model(folder), load_in_fp8(folder, True)
    caches = {dtype: KvCache(half.spec, 4, 1, dtype, True, False) for dtype in (torch.bfloat16, torch.float32)}
    load_LE = np.zeros((3, 8), np.int64)
    assert bind(half, caches[torch.bfloat16], load_LE) is not None
    assert bind(half, caches[torch.float32], load_LE) is None
    assert bind(whole, caches[torch.bfloat16], load_LE) is None
    assert bind(fp8, caches[torch.bfloat16], load_LE) is None
