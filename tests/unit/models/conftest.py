"""A tiny mixed model (dense and MoE layers, biases) that the tests of this folder share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models import hf
from slipstream.models.decoder import Decoder
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "attention_bias": True,
    "dtype": "float32",
}


@pytest.fixture
def model() -> Decoder:
    """Weights that tell the parts apart: no ones and no zeros."""
    built = build_model(ModelSpec.from_config(CONFIG), seed=2)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return built


@pytest.fixture
def folder(model: Decoder, tmp_path: Path) -> Path:
    """The same model as an HF folder in one file."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    hf.write_tensors(path, hf.hf_tensors(model))
    return path
