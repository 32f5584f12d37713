"""Which tokens sparse attention looks at: the lightning indexer of DeepSeek-V3.2.

A cheap score says how much the token at t wants to see the one at s <= t:

    score(t, s) = Σ_j weight[t, j] · relu(q[t, j] · k[s])

and the `top_k` best are seen. Many scores are exactly 0; among equals the earlier token is taken, so that training and serving choose
alike. Plain torch, fp32, without gradient. The choice is made for packed documents and over a paged cache of the keys k.

Source: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, section 2.1.

Shapes: T tokens, J index heads, i features of an index head, K tokens chosen, D documents, P their padded length, S sequences,
Q queries, C padded context, N blocks, B tokens per block or blocks per sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.attention import DocLayout, context_slots, equal_batches, query_places

QUERIES = 1024
"""Queries of a long document that `late_choice` scores at a time."""


@torch.no_grad()
def doc_index(q_TJi: Tensor, k_Ti: Tensor, weights_TJ: Tensor, layout: DocLayout, top_k: int) -> Tensor | None:
    """Positions [T, K] (int32) within its document of the `top_k` tokens that each token sees; -1 where it has fewer before it.

    None: no document is longer than `top_k`, so every token sees all of its past.
    """
    return None if layout.longest <= top_k else doc_choice(q_TJi, k_Ti, weights_TJ, layout, top_k)


@torch.no_grad()
def doc_choice(q_TJi: Tensor, k_Ti: Tensor, weights_TJ: Tensor, layout: DocLayout, top_k: int) -> Tensor:
    """The same, also where everything is chosen."""
    gathers, place_T = layout.buckets
    parts = []
    for gather_DP in gathers:
        key_P = torch.arange(gather_DP.shape[1], device=q_TJi.device)
        scores_DPP = _scores(q_TJi[gather_DP], k_Ti[gather_DP], weights_TJ[gather_DP])
        parts.append(_best(scores_DPP, key_P[None], key_P, top_k).flatten(0, 1))
    return torch.cat(parts).index_select(0, place_T) if parts else torch.empty(0, top_k, dtype=torch.int32, device=q_TJi.device)


@torch.no_grad()
def late_choice(q_QJi: Tensor, k_Ci: Tensor, weights_QJ: Tensor, top_k: int) -> Tensor:
    """[Q, K] of the last Q of the C tokens of a document; -1 where a token has fewer before it."""
    place_C = torch.arange(len(k_Ci), device=q_QJi.device)
    parts = zip(q_QJi.split(QUERIES), weights_QJ.split(QUERIES), place_C[len(k_Ci) - len(q_QJi) :].split(QUERIES), strict=True)
    return torch.cat([_best(_scores(q[None], k_Ci[None], weights[None]), place[None], place_C, top_k)[0] for q, weights, place in parts])


@torch.no_grad()
def paged_index(
    q_TJi: Tensor,
    keys_NBi: Tensor,
    weights_TJ: Tensor,
    block_table_SB: Tensor,
    query_starts_S1: Tensor,
    context_S: Tensor,
    top_k: int,
) -> Tensor | None:
    """The same over a paged cache that already holds the new tokens' own keys; the batch is given as to `paged_attention`.

    None: no context is longer than `top_k`.
    """
    if int(context_S.max()) <= top_k:
        return None
    ids_TK = torch.empty(len(q_TJi), top_k, dtype=torch.int32, device=q_TJi.device)
    for group, row_SQ in equal_batches(query_starts_S1):
        slot_SC, _ = context_slots(block_table_SB[group], context_S[group], keys_NBi.shape[1])
        k_SCi = keys_NBi.flatten(0, 1)[slot_SC]  # what lies behind a context is in the future of every query, so it is never chosen
        key_C = torch.arange(slot_SC.shape[1], device=q_TJi.device)
        scores_SQC = _scores(q_TJi[row_SQ], k_SCi, weights_TJ[row_SQ])
        ids_TK[row_SQ] = _best(scores_SQC, query_places(context_S[group], row_SQ.shape[1]), key_C, top_k)
    return ids_TK


def write_index(k_Ti: Tensor, keys_NBi: Tensor, slots_T: Tensor) -> None:
    """Store the index keys of T tokens in place. `slots` int64 [T]: block · block_tokens + offset of each token."""
    keys_NBi.view(-1, keys_NBi.shape[-1]).index_copy_(0, slots_T, k_Ti.to(keys_NBi.dtype))


def _scores(q_SQJi: Tensor, k_SCi: Tensor, weights_SQJ: Tensor) -> Tensor:
    """[S, Q, C]. One head at a time: all at once would need J times the memory."""
    k_SiC = k_SCi.float().mT
    scores_SQC = torch.zeros(*q_SQJi.shape[:2], k_SCi.shape[1], device=k_SCi.device)
    for head in range(q_SQJi.shape[2]):
        scores_SQC += weights_SQJ[..., head, None].float() * F.relu(q_SQJi[:, :, head].float() @ k_SiC)
    return scores_SQC


def _best(scores_SQC: Tensor, place_SQ: Tensor, key_C: Tensor, top_k: int) -> Tensor:
    """[S, Q, K] int32, best first."""
    future_SQC = key_C > place_SQ.unsqueeze(-1)
    ranked, ids = scores_SQC.masked_fill(future_SQC, -torch.inf).sort(dim=-1, descending=True, stable=True)
    ids_SQK = ids[..., :top_k].masked_fill(ranked[..., :top_k] == -torch.inf, -1).int()
    return F.pad(ids_SQK, (0, top_k - ids_SQK.shape[-1]), value=-1)
