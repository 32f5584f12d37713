"""Context parallelism: several processes hold parts of one row, and attention crosses their edges.

The models know nothing of it: it is a `Context` around the one of this process's tokens. Ways of attending:

    all_gather  keys and values of the whole row everywhere, queries stay; skipped where no document crosses an edge
    ring        keys and values of one other process after the other, and only those that are needed; queries stay
    ulysses     tokens are swapped for heads, so that each process attends with some heads over the whole row, and swapped back
                (Jacobs et al., "DeepSpeed Ulysses", 2023)

Which tokens a process has is `rows.spans`' choice. Sparse attention chooses among all tokens of a document: index keys are gathered.

Shapes: T tokens of the row, t of them here, N loss tokens, P processes, H query heads, G key/value heads, d head features, J index heads,
i features of them, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import StateError
from slipstream.models.context import Context, Expand
from slipstream.ops import DocLayout, Sight, doc_attention
from slipstream.ops.indexer import doc_choice, late_choice
from slipstream.parallel.comm import all_gather, all_to_all
from slipstream.parallel.crossing import Gathered, Opened, Ring, Transport, crossing_attention
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.rows import Span
from slipstream.parallel.tiles import crossed, heads
from slipstream.types import MicroBatch


def across(inner: Context, row: MicroBatch, spans: Sequence[Span], mesh: Mesh) -> Context:
    """`inner` (routing, and attention where documents end at all edges) for the own tokens of `row`, of which other processes hold the
    rest: each its span."""
    if mesh.config.cp == 1:
        return inner
    if mesh.config.cp_method == "ulysses":
        return _Ulysses(inner, row, spans, mesh)
    return _Crossed(inner, row, spans, mesh) if crossed(spans, row.doc_starts_D) else inner


def gather_tokens(own_nF: Tensor, own_PN: Sequence[np.ndarray], mesh: Mesh) -> Tensor:
    """Values of all loss tokens of a row [N, F] from what each process computed of those that are `own` (bool); without gradient."""
    counts_P = [int(own_N.sum()) for own_N in own_PN]
    parts = all_gather(_filled(own_nF.detach(), max(counts_P)), mesh.context_group).unflatten(0, (len(counts_P), -1))
    values_NF = own_nF.new_empty(len(own_PN[0]), *own_nF.shape[1:])
    for part, own_N, count in zip(parts, own_PN, counts_P, strict=True):
        values_NF[torch.from_numpy(own_N)] = part[:count]
    return values_NF


class _Across:
    """What all ways share: routing, which needs no other process."""

    def __init__(self, inner: Context, row: MicroBatch, spans: Sequence[Span], mesh: Mesh) -> None:
        self._inner, self._spans, self._rank, self._group = inner, spans, mesh.context, mesh.context_group
        self._starts_D, self._size, self._tokens = row.doc_starts_D, mesh.config.cp, row.num_tokens

    def route(self, moe_layer: int, scores_TE: Tensor, top_k: int) -> Tensor:
        return self._inner.route(moe_layer, scores_TE, top_k)

    def weigh(self, moe_layer: int, logits_TE: Tensor, gates_TK: Tensor) -> Tensor:
        return self._inner.weigh(moe_layer, logits_TE, gates_TK)


class _Crossed(_Across):
    """Only the heads of chunks need other processes (see `parallel.tiles`): the rest attends as ever."""

    def __init__(self, inner: Context, row: MicroBatch, spans: Sequence[Span], mesh: Mesh) -> None:
        super().__init__(inner, row, spans, mesh)
        self._make = Ring if mesh.config.cp_method == "ring" else Gathered
        self._transports: dict[int, Transport] = {}
        own = spans[self._rank]
        self._heads = heads(own, self._starts_D)
        self._sizes = [n for head, (_, end) in zip(self._heads, own.chunks, strict=True) for n in (head.end - head.first, end - head.end)]
        """Tokens of the head and of the rest of every chunk."""
        starts, offset = [0], 0
        for head, (_, end) in zip(self._heads, own.chunks, strict=True):
            inside = self._starts_D[(self._starts_D > head.end) & (self._starts_D < end)]
            starts += [*(inside - head.end + offset).tolist(), offset := offset + end - head.end]
        self._rest = DocLayout(starts)
        self._selected: dict[int, Tensor | None] = {}

    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        return self._attend(q_THd, torch.cat((k_TGd, v_TGd), 1), Opened(_halves), sight)

    def attend_latent(self, layer: int, q_THd: Tensor, latent_TC: Tensor, up: Tensor, expand: Expand, sight: Sight | None = None) -> Tensor:
        return self._attend(q_THd, latent_TC, Opened(expand, (up,)), sight)

    def _attend(self, q_tHd: Tensor, x: Tensor, opened: Opened, sight: Sight | None) -> Tensor:
        (q_head, q_rest), (_, x_rest) = self._split(q_tHd), self._split(x)
        sight_head = sight_rest = sight
        if sight is not None and sight.selected_TK is not None:
            sight_head, sight_rest = (replace(sight, selected_TK=part) for part in self._split(sight.selected_TK))
        scale, window = q_tHd.shape[-1] ** -0.5, 0 if sight is None else sight.window
        if window not in self._transports:
            self._transports[window] = self._make(self._spans, self._rank, self._starts_D, window, self._group)
        out_head = crossing_attention(q_head, x, opened, self._transports[window], scale, sight_head)
        out_rest = doc_attention(q_rest, *opened.keys_values(x_rest, *opened.weights), self._rest, scale, sight_rest)
        parts = zip(out_head.split(self._sizes[0::2]), out_rest.split(self._sizes[1::2]), strict=True)
        return torch.cat([part for pair in parts for part in pair])

    def select(self, layer: int, q_TJi: Tensor, k_Ti: Tensor, weights_TJ: Tensor, top_k: int) -> Tensor | None:
        self._selected[layer] = None
        if np.diff(self._starts_D).max() > top_k:
            self._selected[layer] = self._choice(q_TJi, k_Ti, weights_TJ, top_k)
        return self._selected[layer]

    def selected(self, layer: int) -> Tensor | None:
        return self._selected[layer]

    def _choice(self, q_tJi: Tensor, k_ti: Tensor, weights_tJ: Tensor, top_k: int) -> Tensor:
        longest = max(span.num_tokens for span in self._spans)
        gathered = all_gather(_filled(k_ti, longest), self._group).unflatten(0, (self._size, -1))
        k_Ti = k_ti.new_empty(self._tokens, k_ti.shape[1])
        for span, part in zip(self._spans, gathered, strict=True):
            k_Ti[torch.from_numpy(span.tokens_t)] = part[: span.num_tokens]
        (q_head, q_rest), (weights_head, weights_rest) = self._split(q_tJi), self._split(weights_tJ)
        rest = doc_choice(q_rest, self._split(k_ti)[1], weights_rest, self._rest, top_k).split(self._sizes[1::2])
        parts = zip(self._heads, q_head.split(self._sizes[0::2]), weights_head.split(self._sizes[0::2]), rest, strict=True)
        chosen = [(late_choice(q, k_Ti[head.document : head.end], weights, top_k), after) for head, q, weights, after in parts]
        return torch.cat([part for pair in chosen for part in pair])

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of all heads, and all the others."""
        parts = x.split(self._sizes)
        return torch.cat(parts[0::2]), torch.cat(parts[1::2])


class _Ulysses(_Across):
    """c = ⌈T / P⌉: what every process takes part with in an exchange; the last ones fill up with zeros."""

    def __init__(self, inner: Context, row: MicroBatch, spans: Sequence[Span], mesh: Mesh) -> None:
        super().__init__(inner, row, spans, mesh)
        self._layout = DocLayout(row.doc_starts_D)
        self._part = -(-row.num_tokens // self._size)

    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        size, own = self._size, len(q_THd)
        copies = max(1, size // k_TGd.shape[1])  # of key/value heads, where there are fewer than processes
        k_TGd, v_TGd = (x.repeat_interleave(copies, 1) for x in (k_TGd, v_TGd)) if copies > 1 else (k_TGd, v_TGd)
        heads, kv_heads = q_THd.shape[1] // size, k_TGd.shape[1] // size
        by_process = [x.unflatten(1, (size, -1)) for x in (q_THd, k_TGd, v_TGd)]
        mine = _filled(torch.cat(by_process, 2), self._part).transpose(0, 1).flatten(0, 1)
        q, k, v = self._swap(mine)[: self._tokens].split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        if sight is not None and sight.sinks_H is not None:
            sight = replace(sight, sinks_H=sight.sinks_H.unflatten(0, (size, -1))[self._rank])
        out_Thd = doc_attention(q, k, v, self._layout, q_THd.shape[-1] ** -0.5, sight)
        back = self._swap(_filled(out_Thd, self._part * size))
        return back.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)[:own]

    def attend_latent(self, layer: int, q_THd: Tensor, latent_TC: Tensor, up: Tensor, expand: Expand, sight: Sight | None = None) -> Tensor:
        return self.attend(layer, q_THd, *expand(latent_TC, up), sight)

    def select(self, layer: int, q_TJi: Tensor, k_Ti: Tensor, weights_TJ: Tensor, top_k: int) -> Tensor | None:
        raise StateError("sparse attention with cp_method = 'ulysses': refused by parallel.fit")

    def selected(self, layer: int) -> Tensor | None:
        raise StateError("sparse attention with cp_method = 'ulysses': refused by parallel.fit")

    def _swap(self, x: Tensor) -> Tensor:
        return all_to_all(x, [self._part] * self._size, [self._part] * self._size, self._group)


def _halves(kv_TGd: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that lie side by side."""
    k_TGd, v_TGd = kv_TGd.chunk(2, dim=1)
    return k_TGd, v_TGd


def _filled(x: Tensor, tokens: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, tokens - len(x)))
