"""Context parallelism: several processes hold neighbouring parts of one row, and attention crosses their edges.

The models know nothing of it: it is a `Context` around the one of this process's tokens. Two ways of attending:

    all_gather  keys and values of the whole row everywhere, queries stay; skipped where no document crosses an edge
    ulysses     tokens are swapped for heads, so that each process attends with some heads over the whole row, and swapped back
                (Jacobs et al., "DeepSpeed Ulysses", 2023)

Shapes: T tokens of the row, t of them here, c = ⌈T / P⌉, P processes, H query heads, G key/value heads, d head features, Q queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import StateError
from slipstream.models.context import Context
from slipstream.ops import DocLayout, Sight, doc_attention
from slipstream.parallel.comm import all_gather, all_to_all
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.rows import Span
from slipstream.types import MicroBatch

MASK_QUERIES = 1024
"""Queries of a crossing document that attend at a time: bounds the mask to this times the length of the document."""


def across(inner: Context, row: MicroBatch, span: Span, mesh: Mesh) -> Context:
    """`inner` (routing, and attention where documents end at all edges) for the tokens `span` of `row`, of which other processes hold
    the rest."""
    if mesh.config.cp == 1:
        return inner
    return _Ulysses(inner, row, span, mesh) if mesh.config.cp_method == "ulysses" else _AllGather(inner, row, span, mesh)


def gather_tokens(own_n2: Tensor, counts_P: list[int], mesh: Mesh) -> Tensor:
    """Values of the tokens of a whole row [N, 2] from what each process computed of it; without gradient."""
    padded = F.pad(own_n2.detach(), (0, 0, 0, max(counts_P) - len(own_n2)))
    gathered = all_gather(padded, mesh.context_group).unflatten(0, (len(counts_P), -1))
    return torch.cat([part[:count] for part, count in zip(gathered, counts_P, strict=True)])


class _Across:
    """What both ways share: where the row is cut, and routing, which needs no other process."""

    def __init__(self, inner: Context, row: MicroBatch, span: Span, mesh: Mesh) -> None:
        self._inner, self._span, self._group = inner, span, mesh.context_group
        self._tokens, self._size = row.num_tokens, mesh.config.cp
        self._part = -(-row.num_tokens // mesh.config.cp)
        """c: what every process takes part with in an exchange; the last ones fill up with zeros."""

    def route(self, moe_layer: int, scores_TE: Tensor, top_k: int) -> Tensor:
        return self._inner.route(moe_layer, scores_TE, top_k)

    def select(self, layer: int, q_TJi: Tensor, k_Ti: Tensor, weights_TJ: Tensor, top_k: int) -> Tensor | None:
        raise StateError("sparse attention over several processes: refused by parallel.fit")

    def selected(self, layer: int) -> Tensor | None:
        raise StateError("sparse attention over several processes: refused by parallel.fit")

    def _filled(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, self._part - len(x)))


class _AllGather(_Across):
    def __init__(self, inner: Context, row: MicroBatch, span: Span, mesh: Mesh) -> None:
        super().__init__(inner, row, span, mesh)
        starts = row.doc_starts_D
        edges = {i * self._part for i in range(1, self._size) if i * self._part < self._tokens}
        self._crossed = not edges <= set(starts.tolist())
        """Whether a document crosses any edge: the same for all processes of the row, which exchange or do not."""
        here = starts[(starts >= span.first) & (starts <= span.end)]
        self._head = int(here[0]) if len(here) else span.end
        """End of the document that began before `span`, as far as it is here; `span.first` where none did."""
        self._head_start = int(starts[starts <= span.first][-1])
        rest = [*[s for s in here.tolist() if s < span.end], span.end]
        self._rest = DocLayout([s - self._head for s in rest] if self._head < span.end else [0])

    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        assert sight is None, "refused by parallel.fit"
        if not self._crossed:
            return self._inner.attend(layer, q_THd, k_TGd, v_TGd)
        kv = all_gather(self._filled(torch.cat((k_TGd, v_TGd), 1)), self._group)[: self._tokens]
        k, v = kv.split_with_sizes((k_TGd.shape[1],) * 2, dim=1)
        scale, mine = q_THd.shape[-1] ** -0.5, self._head - self._span.first
        before, own = slice(self._head_start, self._head), slice(self._head, self._span.end)
        head = _attend_to_past(q_THd[:mine], k[before], v[before], scale)
        return torch.cat((head, doc_attention(q_THd[mine:], k[own], v[own], self._rest, scale)))


def _attend_to_past(q_QHd: Tensor, k_TGd: Tensor, v_TGd: Tensor, scale: float) -> Tensor:
    """Attention of the last Q of T tokens of a document; fp32 for bf16 inputs, as in `doc_attention`."""
    if q_QHd.dtype is torch.bfloat16:
        return _attend_to_past(q_QHd.float(), k_TGd.float(), v_TGd.float(), scale).bfloat16()
    past = len(k_TGd) - len(q_QHd)
    parts = []
    for first in range(0, len(q_QHd), MASK_QUERIES):
        q = q_QHd[first : first + MASK_QUERIES]
        seen = past + first + len(q)
        mask = torch.ones(len(q), seen, dtype=torch.bool).tril(past + first)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k_TGd[:seen], v_TGd[:seen]))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts) if parts else torch.zeros_like(q_QHd)


class _Ulysses(_Across):
    def __init__(self, inner: Context, row: MicroBatch, span: Span, mesh: Mesh) -> None:
        super().__init__(inner, row, span, mesh)
        self._layout = DocLayout(row.doc_starts_D)

    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        assert sight is None, "refused by parallel.fit"
        size, own = self._size, len(q_THd)
        heads, kv_heads = q_THd.shape[1] // size, k_TGd.shape[1] // size
        by_process = [x.unflatten(1, (size, -1)) for x in (q_THd, k_TGd, v_TGd)]
        mine = self._filled(torch.cat(by_process, 2)).transpose(0, 1).flatten(0, 1)
        q, k, v = self._swap(mine)[: self._tokens].split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        out_Thd = doc_attention(q, k, v, self._layout, q_THd.shape[-1] ** -0.5)
        missing = self._part * size - self._tokens
        back = self._swap(F.pad(out_Thd, (0, 0, 0, 0, 0, missing)))
        return back.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)[:own]

    def _swap(self, x: Tensor) -> Tensor:
        return all_to_all(x, [self._part] * self._size, [self._part] * self._size, self._group)
