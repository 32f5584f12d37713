"""What this machine can do on one thread, and what one step of a model asks of it: the two sides of `benchmarks.limits`.

All times are CPU time of this process, the least of many repeats: what an idle machine's wall clock would show.

Shapes: [rows, in] x [in, out]; T tokens, L tokens of a document.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from slipstream.models.spec import ModelSpec

BUDGET_S = 0.3
"""CPU time spent on one ceiling."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a step, done `count` times: [rows, inner] x [inner, out], on `batch` pairs of matrices at once."""

    name: str
    rows: int
    inner: int
    out: int
    count: float
    batch: int = 1
    causal: bool = False
    """Only half of the result is asked for."""

    @property
    def flops(self) -> float:
        """Of the forward pass; the backward pass has twice as many."""
        return 2.0 * self.rows * self.inner * self.out * self.batch * self.count / (2 if self.causal else 1)


def best_s(fn: Callable[[], object], budget_s: float = BUDGET_S) -> float:
    """Least CPU time of one call, over as many as fit into the budget (three at least)."""
    fn()
    best, spent, calls = float("inf"), 0.0, 0
    while spent < budget_s or calls < 3:
        began = time.process_time()
        fn()
        took = time.process_time() - began
        best, spent, calls = min(best, took), spent + took, calls + 1
    return best


@lru_cache
def matmul_rate(rows: int, inner: int, out: int, batch: int = 1, training: bool = True, dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of torch's product of these sizes; `training`: of it and the two products of its gradient together."""
    x, w, dy = (torch.randn(batch, *shape).to(dtype) for shape in ((rows, inner), (inner, out), (rows, out)))
    if batch == 1:
        x, w, dy = x[0], w[0], dy[0]
    products = [lambda: x @ w]
    if training:
        products += [lambda: dy @ w.mT, lambda: x.mT @ dy]
    many = max(1, int(2e6 / (2.0 * rows * inner * out * batch)))
    seconds = sum(best_s(lambda fn=fn: [fn() for _ in range(many)]) / many for fn in products)
    return 2.0 * rows * inner * out * batch * len(products) / seconds


@lru_cache
def peak_rate(dtype: torch.dtype = torch.float32) -> float:
    """The best FLOP/s of any large square product."""
    return max(matmul_rate(size, size, size, training=False, dtype=dtype) for size in (256, 512, 1024, 2048))


@lru_cache
def read_rate(num_bytes: int) -> float:
    """Bytes/s of reading this much over and over, as the faster of a sum and a matrix-vector product: from cache when it fits there."""
    values = torch.ones(max(1024, num_bytes // 4096 * 1024))
    matrix, vector = values.view(-1, 256), torch.ones(256)
    many = max(1, int(1e6 / values.nbytes))
    seconds = min(best_s(lambda fn=fn: [fn() for _ in range(many)]) for fn in (values.sum, lambda: matrix @ vector))
    return values.nbytes * many / seconds


def training_products(spec: ModelSpec, rows: Sequence[np.ndarray], loss_tokens: int) -> list[Product]:
    """Forward products of one optimizer step over packed rows (given as lengths of their documents), for plain heads, no shared expert."""
    tokens, count = int(sum(lengths.sum() for lengths in rows)), len(rows) * spec.num_layers
    moe_count, dense_count = len(rows) * len(spec.moe_layers), len(rows) * (spec.num_layers - len(spec.moe_layers))
    per_row = tokens // len(rows)
    lengths = np.concatenate(rows)
    typical = round(float((lengths**2).sum() / lengths.sum()))
    # the document length at which as many documents as make up the tokens have the attention products that there are
    pairs = max(1, round(tokens / typical)) * spec.num_heads // len(rows)
    hidden, inner, wide = spec.hidden, spec.expert_intermediate, spec.intermediate
    each = per_row * spec.top_k // max(1, spec.num_experts)
    products = [
        Product("qkv", per_row, hidden, spec.q_rows + 2 * spec.kv_rows, count),
        Product("attention scores", typical, spec.head_dim, typical, count, pairs, causal=True),
        Product("attention values", typical, typical, spec.head_dim, count, pairs, causal=True),
        Product("attention out", per_row, spec.q_rows, hidden, count),
        Product("router", per_row, hidden, spec.num_experts, moe_count),
        Product("experts gate and up", each, hidden, 2 * inner, moe_count * spec.num_experts),
        Product("experts down", each, inner, hidden, moe_count * spec.num_experts),
        Product("dense gate and up", per_row, hidden, 2 * wide, dense_count),
        Product("dense down", per_row, wide, hidden, dense_count),
        Product("head", loss_tokens // len(rows), hidden, spec.vocab_size, len(rows)),
    ]
    return [product for product in products if product.count]


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """What one decode step has to compute and to read."""

    flops: float
    num_bytes: float

    def least_s(self) -> float:
        """The roofline's bound (Williams, Waterman, Patterson, CACM 2009): the slower of the two at its own ceiling."""
        return max(self.flops / peak_rate(), self.num_bytes / read_rate(int(self.num_bytes)))


def decode_work(spec: ModelSpec, batch: int, context: float) -> DecodeWork:
    """For `batch` sequences with `context` tokens each, routed evenly; MoE layers only, fp32."""
    attention = spec.hidden * 2 * (spec.q_rows + spec.kv_rows) * spec.num_layers
    router = spec.hidden * spec.num_experts * len(spec.moe_layers)
    expert = 3 * spec.hidden * spec.expert_intermediate * len(spec.moe_layers)
    head = spec.vocab_size * spec.hidden
    touched = spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** batch)
    keys_and_values = 2 * spec.kv_rows * context * spec.num_layers
    scored = 2 * spec.q_rows * context * spec.num_layers
    flops = 2.0 * batch * (attention + router + expert * spec.top_k + head + scored)
    return DecodeWork(flops, 4.0 * (attention + router + expert * touched + head + batch * keys_and_values))
