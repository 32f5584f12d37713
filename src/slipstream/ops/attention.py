"""Attention over packed documents (training) and over a paged KV cache (serving), with grouped query heads.

It does not allocate blocks and knows no requests. Shapes: T tokens, H query heads, G key/value heads (H is a multiple of G),
d head features, D documents, S sequences, N blocks, B tokens per block or blocks per sequence, P padded length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.errors import StateError
from slipstream.ops.fp8_kv import Fp8Pages, used_blocks
from slipstream.ops.native import LANES, check, dense_tokens, library, loaded, native_for


class DocLayout:
    """Where the documents of a packed row lie: computed once a row and shared by all layers.

    For the torch reference, documents of about equal length share one batched call: lengths are rounded up to a bucket; the tails
    are padding that no real query can see (it lies in their future), so no mask is needed.
    """

    def __init__(self, doc_starts_D: Sequence[int] | np.ndarray | Tensor, device: torch.device | str = "cpu") -> None:
        """`doc_starts_D`: first token of each document plus the row length: D + 1 ascending values from 0."""
        starts = np.asarray(doc_starts_D, dtype=np.int64)
        lengths = np.diff(starts)
        if len(starts) < 1 or starts[0] != 0 or (lengths < 0).any():
            raise StateError(f"doc_starts must ascend from 0 to the row length, got {starts.tolist()[:20]}")
        self.num_tokens = int(starts[-1])
        self.starts_D1 = torch.from_numpy(starts)
        """On the CPU, int64: what the native kernel reads."""
        self.device = device
        self.longest = int(lengths.max(initial=0))

    @functools.cached_property
    def buckets(self) -> tuple[list[Tensor], Tensor]:
        """(per bucket [docs, P] the token of each padded place, row of each token in the buckets laid end to end)."""
        starts = self.starts_D1.numpy()
        lengths = np.diff(starts)
        padded = np.array([_bucket(int(n)) for n in lengths], dtype=np.int64)
        gathers, place_T, offset = [], np.zeros(self.num_tokens, dtype=np.int64), 0
        for size in np.unique(padded[lengths > 0]):
            docs = np.flatnonzero(padded == size)
            column = np.arange(lengths[docs].max())
            index = starts[docs, None] + np.minimum(column, lengths[docs, None] - 1)
            real = column < lengths[docs, None]
            place_T[index[real]] = offset + np.flatnonzero(real.ravel())
            gathers.append(torch.from_numpy(index).to(self.device))
            offset += index.size
        return gathers, torch.from_numpy(place_T).to(self.device)


Documents: TypeAlias = DocLayout | Sequence[int] | np.ndarray | Tensor
Pages: TypeAlias = Tensor | Fp8Pages
"""The keys, or the values, of a layer in a paged cache: [N, B, G, d], or in FP8."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a query sees other than all of its past. Served by the torch references only."""

    window: int = 0
    """Only the last so many tokens, its own among them; 0: all."""
    sinks_H: Tensor | None = None
    """Scores of one more key a head that every query sees and whose value is zero: it takes attention and gives nothing back
    (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023). Differentiable."""

    selected_TK: Tensor | None = None
    """Positions within its document or sequence of the only tokens that a query may see; -1: none (see `ops.indexer`)."""

    def mask(self, row_SQ: Tensor, place_SQ: Tensor, key_C: Tensor) -> Tensor:
        """Which keys [S, 1, Q, C] the queries see. `row`: of a query in T; `place` and `key`: position in the sequence, of keys one after
        the other."""
        age_SQC = place_SQ.unsqueeze(-1) - key_C
        seen_SQC = age_SQC >= 0
        if self.window:
            seen_SQC = seen_SQC & (age_SQC < self.window)
        if self.selected_TK is not None:
            column_SQK = self.selected_TK[row_SQ].long() - key_C[:1]
            chosen = seen_SQC.new_zeros(*row_SQ.shape, len(key_C) + 1)  # the last column takes what is not among these keys, and the -1
            inside_SQK = (column_SQK >= 0) & (column_SQK < len(key_C))
            seen_SQC = seen_SQC & chosen.scatter_(-1, column_SQK.where(inside_SQK, len(key_C)), True)[..., :-1]
        return seen_SQC.unsqueeze(1)


def _bucket(length: int) -> int:
    """Round up to an eighth of the next power of two (at least 8): padding stays below about 1/4, buckets few."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def doc_attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, docs: Documents, scale: float, sight: Sight | None = None) -> Tensor:
    """Causal attention within each document of a packed row; differentiable. `docs` is a `DocLayout` or doc_starts (D + 1 values).
    `sight` None: every query sees all of its past.

    Build the `DocLayout` once a row: it serves every layer. Native, also with gradients, on the CPU for d a multiple of 8. bf16 is computed
    in fp32 there, as in `paged_attention` (torch's bf16 backward of many short documents is also the slower one).
    Raises StateError when the documents do not cover T tokens or the heads do not match.
    """
    layout = docs if isinstance(docs, DocLayout) else DocLayout(docs, q_THd.device)
    (tokens, heads, dim), kv_heads = q_THd.shape, k_TGd.shape[1]
    if k_TGd.shape != (tokens, kv_heads, dim) or v_TGd.shape != k_TGd.shape or heads % kv_heads or layout.num_tokens != tokens:
        shapes = tuple(q_THd.shape), tuple(k_TGd.shape), tuple(v_TGd.shape)
        raise StateError(
            f"doc_attention: documents of {layout.num_tokens} tokens, q, k, v of shapes {shapes}; expected [T, H, d], [T, G, d] twice"
        )
    if q_THd.dtype is torch.bfloat16 and q_THd.is_cpu:
        return doc_attention(q_THd.float(), k_TGd.float(), v_TGd.float(), layout, scale, sight).bfloat16()
    kernels = None if dim % LANES or sight is not None else native_for(q_THd, k_TGd, v_TGd, training=True)
    if kernels is None:
        return doc_attention_reference(q_THd, k_TGd, v_TGd, layout, scale, sight)
    return _DocAttention.apply(dense_tokens(q_THd), dense_tokens(k_TGd), dense_tokens(v_TGd), layout, scale)  # pyright: ignore[reportReturnType]


class _DocAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, layout: DocLayout, scale: float) -> Tensor:
        out_THd, lse_TH = q_THd.new_empty(q_THd.shape), q_THd.new_empty(q_THd.shape[:2])
        inputs = (q_THd, k_TGd, v_TGd, layout.starts_D1, out_THd, lse_TH)
        ctx.sizes = (
            *(len(layout.starts_D1) - 1, q_THd.stride(0), k_TGd.stride(0), v_TGd.stride(0)),
            *(q_THd.shape[1], k_TGd.shape[1], q_THd.shape[2], layout.longest),
            scale,
        )
        check(loaded().doc_attention(*[x.data_ptr() for x in inputs], *ctx.sizes), "doc_attention")
        ctx.save_for_backward(*inputs)
        return out_THd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = (*ctx.saved_tensors, grads[0].contiguous())
        q_THd, k_TGd, v_TGd = inputs[:3]
        outputs = [x.new_empty(x.shape) for x in (q_THd, k_TGd, v_TGd)]
        pointers = [x.data_ptr() for x in (*inputs, *outputs)]
        check(loaded().doc_attention_backward(*pointers, *ctx.sizes), "doc_attention backward")
        return *outputs, None, None


def doc_attention_reference(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, layout: DocLayout, scale: float, sight: Sight | None = None
) -> Tensor:
    """The same in plain torch: one batched SDPA for the documents of each bucket."""
    gathers, place_T = layout.buckets
    parts = [_bucket_attention(q_THd, k_TGd, v_TGd, gather, scale, sight) for gather in gathers]
    return torch.cat(parts).index_select(0, place_T) if parts else torch.zeros_like(q_THd)


def _bucket_attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, gather_DP: Tensor, scale: float, sight: Sight | None) -> Tensor:
    docs, size = gather_DP.shape
    flat = gather_DP.flatten()
    q, k, v = (x.index_select(0, flat).view(docs, size, *x.shape[1:]).transpose(1, 2) for x in (q_THd, k_TGd, v_TGd))
    if sight is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        place_P = torch.arange(size, device=q.device)
        out = _masked_attention(q, k, v, sight.mask(gather_DP, place_P[None], place_P), scale, sight.sinks_H)
    return out.transpose(1, 2).reshape(docs * size, *q_THd.shape[1:])


def _masked_attention(q_SHQd: Tensor, k_SGCd: Tensor, v_SGCd: Tensor, seen_S1QC: Tensor, scale: float, sinks_H: Tensor | None) -> Tensor:
    """[S, H, Q, d]. Every query sees at least one key. With sinks the softmax is written out: SDPA has no place for them."""
    (_, heads, queries, _), kv_heads = q_SHQd.shape, k_SGCd.shape[1]
    if sinks_H is None:
        return F.scaled_dot_product_attention(q_SHQd, k_SGCd, v_SGCd, attn_mask=seen_S1QC, scale=scale, enable_gqa=heads != kv_heads)
    q_SGXd = q_SHQd.reshape(len(q_SHQd), kv_heads, -1, q_SHQd.shape[-1])
    scores_SHQC = (q_SGXd @ k_SGCd.mT).view(-1, heads, queries, k_SGCd.shape[2]) * scale
    sinks_SHQ1 = sinks_H.to(scores_SHQC.dtype).view(-1, 1, 1).expand(*scores_SHQC.shape[:-1], 1)
    weights_SHQC = torch.cat((scores_SHQC.masked_fill(~seen_S1QC, -torch.inf), sinks_SHQ1), -1).softmax(-1)[..., :-1]
    return (weights_SHQC.reshape(*q_SGXd.shape[:3], -1) @ v_SGCd).view(q_SHQd.shape)


def paged_attention(
    q_THd: Tensor,
    k_cache_NBGd: Pages,
    v_cache_NBGd: Pages,
    block_table_SB: Tensor,
    query_starts_S1: Tensor,
    context_S: Tensor,
    scale: float,
    sight: Sight | None = None,
) -> Tensor:
    """Attention of new tokens over a paged KV cache that already holds their own keys and values (see `write_kv`).

    Serves one mixed batch: a sequence with one query is decoding, one with more is a prefill chunk. Query i of n of a sequence
    with c tokens in the cache is the token at position c - n + i and sees positions up to its own, or what `sight` leaves of them.
    `block_table` int32 [S, max blocks]: block of each B tokens, in order (what lies behind the context is ignored);
    `query_starts` int32 [S + 1]: first row in `q` of each sequence, then T; `context` int32 [S]: tokens in the cache,
    queries included. No gradient. Computed in fp32 whatever the dtype of the cache. Native for fp32 and bf16 on the CPU and d a multiple
    of 8; then a token's result is bitwise the same whether it was a decode row or part of a prefill chunk. Of a cache in FP8 the blocks in
    use are dequantised first, once each.
    """
    if isinstance(k_cache_NBGd, Fp8Pages) or isinstance(v_cache_NBGd, Fp8Pages):
        assert isinstance(k_cache_NBGd, Fp8Pages) and isinstance(v_cache_NBGd, Fp8Pages)
        blocks_U, block_table_SB = used_blocks(block_table_SB, context_S, k_cache_NBGd.codes.shape[1])
        k_cache_NBGd, v_cache_NBGd = k_cache_NBGd.read(blocks_U), v_cache_NBGd.read(blocks_U)
        out_THd = paged_attention(q_THd.float(), k_cache_NBGd, v_cache_NBGd, block_table_SB, query_starts_S1, context_S, scale, sight)
        return out_THd.to(q_THd.dtype)
    _check_cache(k_cache_NBGd, v_cache_NBGd)
    _check_batch(block_table_SB, query_starts_S1, context_S)
    (tokens, heads, dim), (blocks, block_tokens, kv_heads, cache_dim) = q_THd.shape, k_cache_NBGd.shape
    if heads % kv_heads or dim != cache_dim:
        raise StateError(f"paged_attention: q has {heads} heads of {dim}, the cache {kv_heads} heads of {cache_dim}")
    half = q_THd.dtype is k_cache_NBGd.dtype is v_cache_NBGd.dtype is torch.bfloat16 and k_cache_NBGd.is_cpu
    kernels = library() if half else native_for(q_THd, k_cache_NBGd, v_cache_NBGd)
    if kernels is None or dim % LANES or sight is not None:
        return paged_attention_reference(q_THd, k_cache_NBGd, v_cache_NBGd, block_table_SB, query_starts_S1, context_S, scale, sight)
    q_THd = dense_tokens(q_THd.float())
    out_THd = q_THd.new_empty(q_THd.shape)
    inputs = (q_THd, k_cache_NBGd, v_cache_NBGd, block_table_SB, query_starts_S1, context_S, out_THd)
    sequences, width = block_table_SB.shape
    sizes = (sequences, width, q_THd.stride(0), tokens, heads, kv_heads, dim, blocks, block_tokens)
    attend = kernels.paged_attention_bf16 if half else kernels.paged_attention
    check(attend(*[x.data_ptr() for x in inputs], *sizes, scale), "paged_attention")
    return out_THd.bfloat16() if half else out_THd


def _check_cache(k_cache_NBGd: Tensor, v_cache_NBGd: Tensor) -> None:
    if k_cache_NBGd.shape != v_cache_NBGd.shape or not (k_cache_NBGd.is_contiguous() and v_cache_NBGd.is_contiguous()):
        shapes = tuple(k_cache_NBGd.shape), tuple(v_cache_NBGd.shape)
        raise StateError(f"KV cache: k and v must be contiguous and of equal shape [N, B, G, d], got {shapes}")


def _check_batch(block_table_SB: Tensor, query_starts_S1: Tensor, context_S: Tensor) -> None:
    for name, x in (("block_table", block_table_SB), ("query_starts", query_starts_S1), ("context", context_S)):
        if x.dtype is not torch.int32 or not x.is_contiguous():
            raise StateError(f"paged_attention: {name} must be contiguous int32, got {x.dtype} with strides {x.stride()}")
    sequences = block_table_SB.shape[0]
    if query_starts_S1.shape != (sequences + 1,) or context_S.shape != (sequences,):
        raise StateError(
            f"paged_attention: {sequences} rows in block_table, {len(query_starts_S1)} query_starts, {len(context_S)} contexts; "
            f"expected S, S + 1 and S"
        )


def paged_attention_reference(
    q_THd: Tensor,
    k_cache_NBGd: Tensor,
    v_cache_NBGd: Tensor,
    block_table_SB: Tensor,
    query_starts_S1: Tensor,
    context_S: Tensor,
    scale: float,
    sight: Sight | None = None,
) -> Tensor:
    """The same in plain torch: decoding sequences together, prefill chunks one at a time."""
    out_THd = torch.empty_like(q_THd)
    for group, row_SQ in equal_batches(query_starts_S1):
        context, table, queries = context_S[group], block_table_SB[group], row_SQ.shape[1]
        slot_SC, exists_SC = context_slots(table, context, k_cache_NBGd.shape[1])
        k, v = (  # what lies behind a context is replaced by zeros
            cache.flatten(0, 1)[slot_SC].float().masked_fill(~exists_SC[:, :, None, None], 0).transpose(1, 2)
            for cache in (k_cache_NBGd, v_cache_NBGd)
        )
        place_SQ, key_C = query_places(context, queries), torch.arange(slot_SC.shape[1], device=q_THd.device)
        seen = (sight or Sight()).mask(row_SQ, place_SQ, key_C)
        out = _masked_attention(q_THd[row_SQ].float().transpose(1, 2), k, v, seen, scale, sight.sinks_H if sight else None)
        out_THd[row_SQ] = out.transpose(1, 2).to(q_THd.dtype)
    return out_THd


def equal_batches(query_starts_S1: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """(sequences with equally many queries, rows of those [S, Q]): all that decode together, prefill chunks one at a time."""
    starts = query_starts_S1.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    decoding, chunks = [s for s, n in enumerate(lengths) if n == 1], [[s] for s, n in enumerate(lengths) if n > 1]
    for group in ([decoding] if decoding else []) + chunks:
        first_S = torch.tensor([starts[s] for s in group], device=query_starts_S1.device)
        yield group, first_S[:, None] + torch.arange(lengths[group[0]], device=query_starts_S1.device)


def context_slots(block_table_SB: Tensor, context_S: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(slot in the cache of each token [S, C], whether it exists): contexts are padded to the longest."""
    place_C = torch.arange(int(context_S.max()), device=context_S.device)
    exists_SC = place_C < context_S[:, None]
    slot_SC = block_table_SB.long()[:, place_C // block] * block + place_C % block
    return slot_SC.where(exists_SC, 0), exists_SC


def query_places(context_S: Tensor, queries: int) -> Tensor:
    """Positions [S, Q] of the last `queries` tokens of each context."""
    return (context_S - queries)[:, None] + torch.arange(queries, device=context_S.device)


def write_kv(k_TGd: Tensor, v_TGd: Tensor, k_cache_NBGd: Pages, v_cache_NBGd: Pages, slots_T: Tensor) -> None:
    """Store the keys and values of T tokens in place. `slots` int64 [T]: block · block_tokens + offset of each token."""
    if isinstance(k_cache_NBGd, Fp8Pages) or isinstance(v_cache_NBGd, Fp8Pages):
        assert isinstance(k_cache_NBGd, Fp8Pages) and isinstance(v_cache_NBGd, Fp8Pages)
        k_cache_NBGd.write(k_TGd, slots_T)
        v_cache_NBGd.write(v_TGd, slots_T)
        return None
    _check_cache(k_cache_NBGd, v_cache_NBGd)
    blocks, block_tokens, kv_heads, dim = k_cache_NBGd.shape
    if k_TGd.shape != (len(slots_T), kv_heads, dim) or v_TGd.shape != k_TGd.shape or slots_T.dtype is not torch.int64:
        shapes = tuple(k_TGd.shape), tuple(v_TGd.shape), tuple(slots_T.shape), slots_T.dtype
        raise StateError(f"write_kv: k, v and int64 slots must be [T, {kv_heads}, {dim}] twice and [T], got {shapes}")
    kernels = native_for(k_TGd, v_TGd, k_cache_NBGd, v_cache_NBGd)
    if kernels is None or not slots_T.is_contiguous():
        return write_kv_reference(k_TGd, v_TGd, k_cache_NBGd, v_cache_NBGd, slots_T)
    k_TGd, v_TGd = dense_tokens(k_TGd), dense_tokens(v_TGd)
    pointers = [x.data_ptr() for x in (k_TGd, v_TGd, k_cache_NBGd, v_cache_NBGd, slots_T)]
    sizes = (len(slots_T), k_TGd.stride(0), v_TGd.stride(0), kv_heads * dim, blocks * block_tokens)
    return check(kernels.write_kv(*pointers, *sizes), "write_kv")


def write_kv_reference(k_TGd: Tensor, v_TGd: Tensor, k_cache_NBGd: Tensor, v_cache_NBGd: Tensor, slots_T: Tensor) -> None:
    """The same in plain torch."""
    k_cache_NBGd.view(-1, *k_cache_NBGd.shape[2:]).index_copy_(0, slots_T, k_TGd)
    v_cache_NBGd.view(-1, *v_cache_NBGd.shape[2:]).index_copy_(0, slots_T, v_TGd)
