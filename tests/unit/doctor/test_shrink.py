"""The shrunken model of every architecture keeps its options, and can be built, served and trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.config.serve import EngineConfig
from slipstream.doctor import material
from slipstream.doctor.shrink import VOCAB, small_config, write_small_model
from slipstream.errors import ModelError
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec


def folder_of(tmp_path: Path, config: dict) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("preset", PRESETS)
def test_every_architecture_shrinks_to_two_layers_that_an_engine_serves(tmp_path: Path, preset: str):
    whole = ModelSpec.from_config(PRESETS[preset])
    spec = write_small_model(folder_of(tmp_path, dict(PRESETS[preset])), tmp_path / "small", seed=0)
    assert spec.num_layers == 2 and spec.num_params < 400_000
    for option in ("family", "router_score", "router_bias", "norm_top_k", "gate_scale", "sinks", "qk_norm", "tie_embeddings", "clamped"):
        assert getattr(spec, option) == getattr(whole, option), option
    assert bool(spec.moe_layers) == bool(whole.moe_layers)
    assert (spec.latent is None, spec.indexer is None) == (whole.latent is None, whole.indexer is None)
    assert (spec.num_groups > 1) == (whole.num_groups > 1)
    if whole.moe_layers and len(whole.moe_layers) < whole.num_layers:
        assert spec.moe_layers == (1,), "one layer of each kind"
    if whole.window_layers:
        assert spec.window_layers == (0,) and 0 < spec.window < material.SEQ_LEN
    if whole.indexer is not None and len(whole.index_layers) < whole.num_layers:
        assert spec.index_layers == (0,), "the other layer takes its choice"
    samples = material.play(material.make_engine(tmp_path / "small", EngineConfig(), seed=0), VOCAB, seed=0)
    assert len(samples) == material.ROLLOUTS and all(sample.loss_mask_T.any() for sample in samples)
    assert all(bool(sample.routing) == bool(spec.moe_layers) for sample in samples)


def test_published_sizes_shrink_too():
    glm5 = dict(PRESETS["tiny-glm-dsa"]) | {
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 154880,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_types": ["full"] * 3 + ["shared"] * 75,
        "quantization_config": {"quant_method": "fp8"},
    }
    spec = ModelSpec.from_config(small_config(glm5))
    assert spec.num_params < 400_000 and (spec.num_experts, spec.top_k, spec.num_heads) == (8, 2, 4)


def test_a_model_that_cannot_be_used_is_named_by_its_own_file(tmp_path: Path):
    source = folder_of(tmp_path, {**PRESETS["tiny-moe"], "num_experts_per_tok": 99})
    with pytest.raises(ModelError, match=str(source)):
        write_small_model(source, tmp_path / "small", seed=0)


def test_the_batches_hold_the_same_samples_cut_up_differently(tmp_path: Path):
    spec = write_small_model(folder_of(tmp_path, dict(PRESETS["tiny-moe"])), tmp_path / "small", seed=0)
    samples = material.play(material.make_engine(tmp_path / "small", EngineConfig(), seed=0), VOCAB, seed=0)
    batches = material.batches(samples, spec.num_experts)
    assert len({batch.loss_tokens for batch in batches.values()}) == 1
    assert len(batches["together"].micro_batches) == 1 < len(batches["packed"].micro_batches) < len(batches["alone"].micro_batches)
    packed, forced = (np.concatenate([row.routing_TLK for row in batches[name].micro_batches]) for name in ("packed", "forced"))
    known = np.concatenate([row.routing_valid_T for row in batches["packed"].micro_batches])
    assert (packed != forced).any(axis=(1, 2))[known].all()
