"""How near a step of a model that is large enough to be bound by its matmuls comes to the machine's best matmul, in bfloat16.

One of the two parts of `benchmarks.trainer`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._ceilings import matmul_rate, peak_rate, training_products
from benchmarks._texts import Documents, make
from benchmarks.harness import median, spread
from slipstream.config import validate
from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.models.load import load_model
from slipstream.trainer.sft import demonstration_batch
from slipstream.trainer.step import Learner
from slipstream.types import Batch

_LARGE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
LARGE_MODELS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "large moe": ("small-moe", {**_LARGE, "num_experts": 8, "moe_intermediate_size": 1536}),
    "large dense": ("tiny-dense", {**_LARGE, "intermediate_size": 3072}),
}


def ceiling_rows(name: str, step_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The step of a large model in bfloat16, and the best rate of any product beside the rates of its own (not in the table)."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = make(Path(scratch) / "model", *LARGE_MODELS[name])
        documents, model = Documents(folder).draw(step_tokens // 16, 0), load_model(folder)
    ends = np.cumsum([len(document) for document in documents])
    kept = [np.array(document, np.int32) for document, end in zip(documents, ends, strict=True) if end <= step_tokens]
    config = validate(TrainerConfig, {"dtype": "bfloat16", "loss": {"type": "policy_gradient"}})
    learner = Learner(model, config, validate(OptimConfig, {"lr": 1e-6}), rounds + 1)
    batch = demonstration_batch(1, [(tokens_T, np.arange(len(tokens_T)) > 0) for tokens_T in kept], config.row_tokens)
    products = training_products(model.spec, [np.diff(row.doc_starts_D) for row in batch.micro_batches], batch.loss_tokens)
    flops = 3 * sum(product.flops for product in products)
    learner.step(batch)
    seconds = [seconds_of(learner, batch) for _ in range(rounds)]
    step_s, peak = median(seconds), peak_rate(torch.bfloat16)
    rates = [matmul_rate(p.rows, p.inner, p.out, p.batch, dtype=torch.bfloat16) for p in products]
    least_s = sum(3 * product.flops / rate for product, rate in zip(products, rates, strict=True))
    step = {
        "model": name,
        "what": "step",
        "setting": f"{model.spec.num_params / 1e6:.0f}M parameters",
        "tokens": batch.num_tokens,
        "tokens_per_s": batch.num_tokens / step_s,
        "spread": spread(seconds),
        "gflops": flops / step_s / 1e9,
        "frac": flops / step_s / peak,
        "frac_of_shapes": least_s / step_s,
    }
    ceilings = [
        {"product": f"{p.name} [{p.rows}, {p.inner}] x [{p.inner}, {p.out}]", "gflops": rate / 1e9}
        for p, rate in zip(products, rates, strict=True)
    ]
    best = {"model": name, "what": "best large matmul", "setting": f"{peak / 1e9:.0f} GFLOP/s", "gflops": peak / 1e9, "ceilings": ceilings}
    return [step, best]


def seconds_of(learner: Learner, batch: Batch) -> float:
    """CPU time, as of the rates that it is compared with."""
    began = time.process_time()
    learner.step(batch)
    return time.process_time() - began
