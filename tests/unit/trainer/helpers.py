"""A small model on disk, and random batches for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from slipstream.algorithms.packing import assign
from slipstream.config import RunConfig, to_toml, validate
from slipstream.models.hf import hf_tensors, write_tensors
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec
from slipstream.types import Batch, MicroBatch

HF_CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def model_folder(folder: Path, **changes) -> Path:
    """An HF folder (without tokenizer) with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**HF_CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    write_tensors(folder, hf_tensors(build_model(ModelSpec.from_config(values), seed=1)), None)
    return folder


def run_config(folder: Path, model: Path, **changes) -> RunConfig:
    """A run at `folder` with small rows; `changes` are tables of the run file."""
    values = {
        "name": folder.name,
        "runs_dir": folder.parent,
        "max_steps": 4,
        "model": {"path": model, "seq_len": 64},
        "envs": [{"id": "none", "sampling": {"max_tokens": 32}}],
        "checkpoint": {"interval": 2},
        **changes,
    }
    values["trainer"] = {"row_tokens": 64, "optim": {"lr": 1e-2}, **changes.get("trainer", {})}
    return validate(RunConfig, values)


def write_run(config: RunConfig) -> Path:
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "config.toml").write_text(to_toml(config))
    return config.folder


def make_batch(step: int = 1, num_samples: int = 12, row_tokens: int = 64, seed: int = 0, order: np.ndarray | None = None) -> Batch:
    """Random samples with random routing (about three quarters of the rows valid), packed in the given order of samples."""
    samples = [_sample(np.random.default_rng((seed, step, i)), i, step) for i in range(num_samples)]
    if order is not None:
        samples = [samples[i] for i in order]
    rows = tuple(_pack([samples[i] for i in row]) for row in assign([s.num_tokens for s in samples], row_tokens))
    rewards = np.zeros(num_samples, dtype=np.float32)
    loss_tokens = sum(int(row.loss_mask_T.sum()) for row in rows)
    return Batch(step, rows, loss_tokens, tuple(f"r{i}" for i in range(num_samples)), rewards, rewards, {"cursor": step})


def _sample(rng: np.random.Generator, index: int, step: int) -> MicroBatch:
    n = int(rng.integers(4, 25))
    mask = rng.random(n) < 0.6
    mask[0], mask[-1] = False, True
    return MicroBatch(
        tokens_T=rng.integers(0, 50, n).astype(np.int32),
        positions_T=np.arange(n, dtype=np.int32),
        doc_starts_D=np.array([0, n], dtype=np.int32),
        loss_mask_T=mask,
        logprobs_T=np.where(mask, -3.9 + 0.3 * rng.standard_normal(n), 0).astype(np.float32),
        versions_T=np.where(mask, step - 1 - rng.integers(0, 2, n), -1).astype(np.int32),
        advantages_T=np.full(n, rng.standard_normal(), dtype=np.float32),
        temperature_T=np.full(n, 0.8, dtype=np.float32),
        sample_T=np.full(n, index, dtype=np.int32),
        routing_TLK=np.argsort(rng.random((n, 2, 8)), axis=2)[..., :2].astype(np.uint8),
        routing_valid_T=rng.random(n) < 0.75,
    )


def _pack(samples: list[MicroBatch]) -> MicroBatch:
    joined = {
        name: np.concatenate([getattr(s, name) for s in samples]) for name in MicroBatch.__dataclass_fields__ if name != "doc_starts_D"
    }
    starts = np.concatenate([[0], np.cumsum([s.num_tokens for s in samples])]).astype(np.int32)
    return MicroBatch(**joined, doc_starts_D=starts)


def without_routing(batch: Batch) -> Batch:
    rows = tuple(replace(row, routing_TLK=None, routing_valid_T=None) for row in batch.micro_batches)
    return replace(batch, micro_batches=rows)
