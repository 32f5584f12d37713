"""Attention of tokens whose document began in an earlier chunk: with keys and values that other processes hold.

One autograd function attends to the keys that are here, block after block, and merges (`ops.partial`). Backward it does the same again
with each block, from the log-sum-exp of the whole, and hands the gradients of a block's tokens back to where they came from. What
travels is what keys and values are made of: themselves, or the short vectors of latent attention, which `Opened` expands. How it travels:

    all_gather  the whole row in one exchange, gradients in another
    ring        one process after the other: in step s the tokens that process r + s needs go there, and those from r - s arrive. The
                next block is on its way while one is attended to; never more than two of them are here

Shapes: t tokens of this process, Q queries of all heads of its chunks laid end to end, S tokens of a block, H query heads, G key/value
heads, d head features, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.ops import Sight
from slipstream.ops.partial import merge, partial_attention, partial_attention_backward
from slipstream.parallel.comm import Exchange
from slipstream.parallel.rows import Span
from slipstream.parallel.tiles import Tile, needed, tiles


@dataclass(frozen=True, slots=True)
class Opened:
    """`keys_values(x, *weights)`: the keys and values [S, G, d] of tokens of which x is here. Weights get gradients."""

    keys_values: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[Tensor, ...] = ()


class Transport(Protocol):
    """How the tokens of other processes come here. `blocks` and `give_back` are called in the same order by all processes."""

    def blocks(self, x: Tensor) -> Iterator[tuple[Tensor, Sequence[Tile]]]:
        """Blocks of tokens, those of this process among them, and what is to be done with them. `x`: of this process [t, ...]."""
        ...

    def give_back(self, step: int, grad: Tensor) -> None:
        """The gradient of the `step`-th block, fp32."""
        ...

    def gradient(self) -> Tensor:
        """Of the tokens of this process, fp32, once everything has been given back."""
        ...


class Gathered:
    """The whole row at once."""

    def __init__(self, spans: Sequence[Span], rank: int, doc_starts_D: np.ndarray, window: int, group: dist.ProcessGroup) -> None:
        self._counts, self._rank, self._group = [span.num_tokens for span in spans], rank, group
        row = [range(*chunk) for span in spans for chunk in span.chunks]
        self._tiles = list(tiles(spans[rank], row, doc_starts_D, window))
        self._grad = torch.empty(0)

    def blocks(self, x: Tensor) -> Iterator[tuple[Tensor, Sequence[Tile]]]:
        parts = [x.new_empty(max(self._counts), *x.shape[1:]) for _ in self._counts]
        dist.all_gather(parts, _filled(x, max(self._counts)), group=self._group)
        yield torch.cat([part[:count] for part, count in zip(parts, self._counts, strict=True)]), self._tiles

    def give_back(self, step: int, grad: Tensor) -> None:
        parts = [_filled(part, max(self._counts)) for part in grad.split(self._counts)]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts, group=self._group)
        self._grad = total[: self._counts[self._rank]]

    def gradient(self) -> Tensor:
        return self._grad


class Ring:
    """Own tokens first, then those of one process after the other."""

    def __init__(self, spans: Sequence[Span], rank: int, doc_starts_D: np.ndarray, window: int, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._rank = group, len(spans), rank
        self._sent: list[Tensor] = []
        """Places of the own tokens that go to process rank + step."""
        self._received: list[int] = []
        self._tiles: list[list[Tile]] = []
        for step in range(self._size):
            to, by = spans[(rank + step) % self._size], spans[(rank - step) % self._size]
            sent = needed(to, spans[rank], doc_starts_D, window) if step else []
            here = needed(spans[rank], by, doc_starts_D, window) if step else [range(*chunk) for chunk in by.chunks]
            rows = np.concatenate([np.arange(r.start, r.stop) for r in sent]) if sent else np.empty(0, dtype=np.int64)
            self._sent.append(torch.from_numpy(np.searchsorted(spans[rank].tokens_t, rows)))
            self._received.append(sum(map(len, here)))
            self._tiles.append(list(tiles(spans[rank], here, doc_starts_D, window)))
        self._returning: list[Exchange] = []
        self._grad = torch.empty(0)

    def blocks(self, x: Tensor) -> Iterator[tuple[Tensor, Sequence[Tile]]]:
        coming = self._start(1, x)
        yield x, self._tiles[0]
        for step in range(1, self._size):
            block, coming = coming.wait(), self._start(step + 1, x)
            yield block, self._tiles[step]

    def _start(self, step: int, x: Tensor) -> Exchange:
        if step >= self._size:
            return Exchange.nothing(x)
        to, by = (self._rank + step) % self._size, (self._rank - step) % self._size
        return Exchange.start(x.index_select(0, self._sent[step]), to, self._received[step], by, self._group)

    def give_back(self, step: int, grad: Tensor) -> None:
        if step == 0:
            self._grad, self._returning = grad, []
            return
        to, by = (self._rank - step) % self._size, (self._rank + step) % self._size
        self._returning.append(Exchange.start(grad, to, len(self._sent[step]), by, self._group, tag=1))

    def gradient(self) -> Tensor:
        for step, exchange in enumerate(self._returning, 1):
            self._grad.index_add_(0, self._sent[step], exchange.wait())
        return self._grad


def crossing_attention(q_QHd: Tensor, x: Tensor, opened: Opened, transport: Transport, scale: float, sight: Sight | None) -> Tensor:
    """[Q, H, d]. All processes of the row call it together, forward and backward, whether or not they have queries."""
    sinks_H, selected_QK = (None, None) if sight is None else (sight.sinks_H, sight.selected_TK)
    options = transport, opened.keys_values, scale, 0 if sight is None else sight.window
    return _Crossing.apply(options, q_QHd, x, sinks_H, selected_QK, *opened.weights)  # pyright: ignore[reportReturnType]


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: Any, q_QHd: Tensor, x: Tensor, sinks_H: Tensor | None, selected_QK: Tensor | None, *weights: Tensor
    ) -> Tensor:
        transport, keys_values, scale, window = options
        out_QHd = torch.zeros(q_QHd.shape, dtype=torch.float32, device=q_QHd.device)
        lse_QH = out_QHd.new_full(q_QHd.shape[:2], -torch.inf)
        for block, block_tiles in transport.blocks(x):
            if not block_tiles:
                continue
            k_SGd, v_SGd = keys_values(block, *weights)
            for tile in block_tiles:
                at, seen = tile.queries, _seen(tile, window, selected_QK)
                merge(out_QHd[at], lse_QH[at], *partial_attention(q_QHd[at], k_SGd[tile.keys], v_SGd[tile.keys], scale, seen))
        if sinks_H is not None:  # one more key, which has no value
            merge(out_QHd, lse_QH, torch.zeros_like(out_QHd), sinks_H.float().expand_as(lse_QH))
        out_QHd = out_QHd.to(q_QHd.dtype)
        ctx.save_for_backward(q_QHd, x, sinks_H, selected_QK, out_QHd, lse_QH)
        ctx.options, ctx.weights = options, weights  # parameters, which may be of a class that saving would lose
        return out_QHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_QHd, x, sinks_H, selected_QK, out_QHd, lse_QH = ctx.saved_tensors
        transport, keys_values, scale, window = ctx.options
        grad_QHd, grad_q = grads[0].float(), torch.zeros_like(out_QHd, dtype=torch.float32)
        delta_QH = (out_QHd * grad_QHd).sum(-1)
        trained = [w for w in ctx.weights if w.requires_grad]
        totals = [torch.zeros_like(w, dtype=torch.float32) for w in trained]
        for step, (block, block_tiles) in enumerate(transport.blocks(x)):
            if not block_tiles:
                transport.give_back(step, torch.zeros_like(block, dtype=torch.float32))
                continue
            with torch.enable_grad():
                leaf = block.detach().requires_grad_()
                k_SGd, v_SGd = keys_values(leaf, *ctx.weights)
            grad_k, grad_v = (torch.zeros_like(y, dtype=torch.float32) for y in (k_SGd, v_SGd))
            for tile in block_tiles:
                at, keys = tile.queries, tile.keys
                inputs = q_QHd[at], k_SGd.detach()[keys], v_SGd.detach()[keys], lse_QH[at], grad_QHd[at], delta_QH[at]
                dq, dk, dv = partial_attention_backward(*inputs, scale, _seen(tile, window, selected_QK))
                grad_q[at] += dq
                grad_k[keys] += dk
                grad_v[keys] += dv
            found = torch.autograd.grad((k_SGd, v_SGd), [leaf, *trained], (grad_k.to(k_SGd.dtype), grad_v.to(v_SGd.dtype)))
            for total, part in zip(totals, found[1:], strict=True):
                total += part
            transport.give_back(step, found[0].float())
        grad_sinks = None if sinks_H is None else -((sinks_H.float() - lse_QH).exp() * delta_QH).sum(0).to(sinks_H.dtype)
        left = iter(totals)
        grad_weights = [next(left) if w.requires_grad else None for w in ctx.weights]
        return None, grad_q.to(q_QHd.dtype), transport.gradient().to(x.dtype), grad_sinks, None, *grad_weights


def _seen(tile: Tile, window: int, selected_QK: Tensor | None) -> Tensor | None:
    """[queries, keys] bool of a tile; None: everything."""
    if tile.whole and selected_QK is None:
        return None
    device = None if selected_QK is None else selected_QK.device
    queries, keys = (torch.arange(x.stop - x.start, device=device) for x in (tile.queries, tile.keys))
    sight = Sight(window, selected_TK=selected_QK)
    return sight.mask(queries[None] + tile.queries.start, queries[None] + tile.query_place, keys + tile.key_place)[0, 0]


def _filled(x: Tensor, tokens: int) -> Tensor:
    return torch.cat((x, x.new_zeros(tokens - len(x), *x.shape[1:])))
