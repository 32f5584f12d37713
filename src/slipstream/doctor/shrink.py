"""The user's model with two layers and small sizes: every option of its config.json stays, only numbers shrink.

Works on the keys of config.json, not on a `ModelSpec`: the embedded engine, the trainer and transformers all read such a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.models.hf import hf_tensors, write_tensors
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec

LAYERS, VOCAB, POSITIONS = 2, 96, 512
_SIZES: Mapping[str, int] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 6,
    "sliding_window": 6,
    "num_nextn_predict_layers": 0,
}
"""Upper bounds: what is smaller, 0 or null stays. 8 experts and 4 heads can be shared by 2 and by 4 processes."""
_DROPPED = ("quantization_config", "mlp_layer_types", "max_window_layers")
_BY_LAYER = ("layer_types", "indexer_types")


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the shrunken model, in float32."""
    small = {key: value for key, value in config.items() if key not in _DROPPED}
    for key, bound in _SIZES.items():
        if isinstance(small.get(key), int) and not isinstance(small[key], bool):
            small[key] = min(small[key], bound)
    many = config["num_attention_heads"] == config.get("num_key_value_heads", config["num_attention_heads"])
    small["num_attention_heads"] = 4
    if "num_key_value_heads" in small:
        small["num_key_value_heads"] = 4 if many else min(2, small["num_key_value_heads"])
    for key in _BY_LAYER:
        if isinstance(small.get(key), list):
            small[key] = _two_kinds(small[key])
    if small.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(key), dict) and "original_max_position_embeddings" in small[key]:
            small[key] = {**small[key], "original_max_position_embeddings": 64}
    names = [key for key in ("dtype", "torch_dtype") if key in small] or ["dtype"]
    return {**small, **dict.fromkeys(names, "float32"), "bos_token_id": None, "eos_token_id": VOCAB - 1, "pad_token_id": None}


def _two_kinds(kinds: list[Any]) -> list[Any]:
    """The first layer's kind and the first other one."""
    return [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]


def write_small_model(source: Path, folder: Path, seed: int) -> ModelSpec:
    """An HF folder (without tokenizer) of the model in `source`, shrunken, with seeded weights. Raises ModelError: `source` is not usable.

    Biases and norms are random too: what is 0 or 1 everywhere would hide that something is applied twice or not at all.
    """
    ModelSpec.from_folder(source)  # complains about the user's own file, not about ours
    config = small_config(json.loads((source / "config.json").read_text()))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    spec = ModelSpec.from_folder(folder)
    model, generator = build_model(spec, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rpartition(".")[2]
            if "norm" in last or "bias" in last or last == "sinks":
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    write_tensors(folder, hf_tensors(model))
    return spec
