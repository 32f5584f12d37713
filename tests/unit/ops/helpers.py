"""Naive formulas that the ops are compared with, and the inputs that several tests share."""

from itertools import pairwise

import torch
from torch import Tensor


def naive_doc_attention(q: Tensor, k: Tensor, v: Tensor, starts: list[int], scale: float) -> Tensor:
    """One softmax a document, written out."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    parts = []
    for a, b in pairwise(starts):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * scale
        future = torch.ones(b - a, b - a).triu(1).bool()
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v[a:b]))
    return torch.cat(parts)


def naive_sight(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, sinks: Tensor | None) -> Tensor:
    """One document, one softmax a query and head, over the keys that it sees and the sink."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for t in range(len(q)):
        first = max(0, t - window + 1) if window else 0
        for h in range(q.shape[1]):
            scores = k[first : t + 1, h // group] @ q[t, h] * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[h, None]))
            rows.append(scores.softmax(0)[: t + 1 - first] @ v[first : t + 1, h // group])
    return torch.stack(rows).view(q.shape)


def naive_clamped_experts(
    x: Tensor, ids: Tensor, gates: Tensor, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor, limit: float
) -> Tensor:
    """Every token through each of its experts, one at a time; alpha is 2."""
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        for j, e in enumerate(ids[t].tolist()):
            hidden = (x[t] @ gate_up[e] + gate_up_bias[e]).view(-1, 2)
            gate, up = hidden[:, 0].clamp(max=limit), hidden[:, 1].clamp(-limit, limit)
            row = row + gates[t, j] * ((gate * torch.sigmoid(2 * gate) * (1 + up)) @ down[e] + down_bias[e])
        rows.append(row)
    return torch.stack(rows)


def naive_experts(x: Tensor, ids: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every token through each of its experts, one at a time."""
    inner = down.shape[1]
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        for j in range(ids.shape[1]):
            hidden = x[t] @ gate_up[ids[t, j]]
            row = row + gates[t, j] * ((torch.nn.functional.silu(hidden[:inner]) * hidden[inner:]) @ down[ids[t, j]])
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def expert_inputs(tokens: int, num_experts: int, top_k: int, dim: int, inner: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, ids, gates, gate_up, down, with weights scaled so that outputs are about 1."""
    x = torch.randn(tokens, dim, dtype=dtype)
    ids = torch.randn(tokens, num_experts).topk(top_k, dim=-1).indices
    gates = torch.rand(tokens, top_k, dtype=dtype)
    gate_up = torch.randn(num_experts, dim, 2 * inner, dtype=dtype) / dim**0.5
    down = torch.randn(num_experts, inner, dim, dtype=dtype) / inner**0.5
    return [x, ids, gates, gate_up, down]


def paged_inputs(queries: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int, block: int) -> list[Tensor]:
    """q, k_cache, v_cache, block_table, query_starts, context: a full cache, blocks scattered over it."""
    widest = max(1, max(-(-c // block) for c in contexts))
    num_blocks = len(contexts) * widest + 3
    table = torch.randperm(num_blocks)[: len(contexts) * widest].view(len(contexts), widest).int()
    k_cache, v_cache = torch.randn(2, num_blocks, block, kv_heads, dim)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return [torch.randn(sum(queries), heads, dim), k_cache, v_cache, table, starts, torch.tensor(contexts, dtype=torch.int32)]
