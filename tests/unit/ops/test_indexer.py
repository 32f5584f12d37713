"""The indexer's choice: against a loop that follows the formula, at ties, and over the paged cache; attention over what was chosen."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from slipstream.ops import DocLayout, Sight, doc_attention, doc_index, indexer, paged_attention, paged_index, write_index, write_kv
from slipstream.ops.indexer import doc_choice, late_choice

STARTS = [0, 3, 3, 21, 60]


def inputs(tokens: int, heads: int = 4, dim: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, heads, dim), torch.randn(tokens, dim), torch.randn(tokens, heads)


def naive_index(q: Tensor, k: Tensor, weights: Tensor, starts: list[int], top_k: int) -> list[list[int]]:
    """Sorted by score, then by position."""
    chosen = []
    for a, b in pairwise(starts):
        for t in range(a, b):
            scores = [float((weights[t] * (q[t] @ k[s]).relu()).sum()) for s in range(a, t + 1)]
            chosen.append(sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:top_k])
    return chosen


@pytest.mark.parametrize("top_k", [1, 5, 20, 38])
def test_the_best_scores_of_a_document_are_chosen(top_k):
    q, k, weights = inputs(60)
    ids = doc_index(q, k, weights, DocLayout(STARTS), top_k)
    assert ids is not None and ids.shape == (60, top_k) and ids.dtype is torch.int32
    for ours, naive in zip(ids.tolist(), naive_index(q, k, weights, STARTS, top_k), strict=True):
        assert {i for i in ours if i >= 0} == set(naive)
        assert sum(i >= 0 for i in ours) == len(naive)


def test_among_equal_scores_the_earlier_token_is_taken():
    q, k, weights = inputs(60)
    ids = doc_index(q, k, -weights.abs() * (torch.arange(60) % 2)[:, None], DocLayout([0, 60]), 4)
    assert ids is not None
    for t in range(0, 60, 2):
        assert [i for i in ids[t].tolist() if i >= 0] == list(range(min(4, t + 1)))


def test_no_choice_is_made_where_everything_fits():
    assert doc_index(*inputs(60), DocLayout(STARTS), 39) is None
    ids = doc_index(*inputs(60), DocLayout(STARTS), 38)
    assert ids is not None
    q, k, v = torch.randn(3, 60, 2, 8)
    sparse = doc_attention(q, k, v, STARTS, 0.3, Sight(selected_TK=ids))
    torch.testing.assert_close(sparse[:-1], doc_attention(q, k, v, STARTS, 0.3)[:-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("queries", [4, 1024])
@pytest.mark.parametrize("top_k", [1, 5, 38, 100])
def test_the_last_tokens_of_a_document_choose_as_they_do_among_all(top_k, queries, monkeypatch):
    monkeypatch.setattr(indexer, "QUERIES", queries)
    q, k, weights = inputs(60)
    whole = doc_choice(q, k, weights, DocLayout(STARTS), top_k)
    assert whole.shape == (60, top_k)
    for first in (21, 30, 59, 60):
        late = late_choice(q[first:], k[21:], weights[first:], top_k)
        assert torch.equal(late, whole[first:])


def test_chosen_tokens_are_found_among_keys_that_begin_later():
    ids = torch.tensor([[0, 5, -1], [6, 2, 9], [9, 3, 4]], dtype=torch.int32)
    row, place = torch.arange(3)[None], torch.arange(7, 10)[None]
    sight = Sight(selected_TK=ids)
    whole, late = (sight.mask(row, place, torch.arange(first, 10)) for first in (0, 4))
    assert torch.equal(late, whole[..., 4:])
    assert whole[0, 0].nonzero().tolist() == [[0, 0], [0, 5], [1, 2], [1, 6], [2, 3], [2, 4], [2, 9]]


def test_attention_sees_what_was_chosen_and_nothing_else():
    q, k, v = (torch.randn(60, n, 8, requires_grad=True) for n in (4, 2, 2))
    ids = doc_index(*inputs(60), DocLayout(STARTS), 5)
    assert ids is not None
    ours = doc_attention(q, k, v, STARTS, 0.3, Sight(selected_TK=ids))
    rows = []
    for a, b in pairwise(STARTS):
        for t in range(a, b):
            seen = [a + i for i in ids[t].tolist() if i >= 0]
            weights = torch.einsum("hd,shd->hs", q[t], k[seen].repeat_interleave(2, 1)).mul(0.3).softmax(-1)
            rows.append(torch.einsum("hs,shd->hd", weights, v[seen].repeat_interleave(2, 1)))
    naive = torch.stack(rows)
    torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-6)
    slope = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), slope), torch.autograd.grad(naive, (q, k, v), slope), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_paged_choice_and_attention_are_those_of_the_whole_document():
    """A chunk of 30 queries behind 45 tokens, a sequence that decodes, and one that is shorter than the choice."""
    lengths, block, top_k = (75, 33, 6), 16, 9
    table = torch.randperm(10).int().view(2, 5)
    table = torch.cat((table, table.new_full((1, 5), 10)))
    index_cache, kv_cache = torch.full((11, block, 6), torch.nan), torch.full((2, 11, block, 2, 8), torch.nan)
    sequences = [(*inputs(n), *torch.randn(3, n, 2, 8)) for n in lengths]
    for (_, index_k, _, _, k, v), blocks in zip(sequences, table, strict=True):
        place = torch.arange(len(k))
        slots = blocks[place // block].long() * block + place % block
        write_index(index_k, index_cache, slots)
        write_kv(k, v, kv_cache[0], kv_cache[1], slots)
    first = (45, 32, 5)
    q, _, weights, query, _, _ = (torch.cat([s[i][n:] for s, n in zip(sequences, first, strict=True)]) for i in range(6))
    batch = table, torch.tensor([0, 30, 31, 32], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    ids = paged_index(q, index_cache, weights, *batch, top_k)
    assert ids is not None
    whole = [doc_index(*s[:3], DocLayout([0, n]), top_k) for s, n in zip(sequences, lengths, strict=True)]
    short = torch.tensor([[*range(6), -1, -1, -1]], dtype=torch.int32)
    expected = torch.cat([short if w is None else w[n:] for w, n in zip(whole, first, strict=True)])
    assert torch.equal(ids.sort(-1).values, expected.sort(-1).values)
    paged = paged_attention(query, kv_cache[0], kv_cache[1], *batch, 0.3, Sight(selected_TK=ids))
    attended = [
        doc_attention(*s[3:], [0, len(s[0])], 0.3, None if w is None else Sight(selected_TK=w))[n:]
        for s, w, n in zip(sequences, whole, first, strict=True)
    ]
    torch.testing.assert_close(paged, torch.cat(attended), rtol=1e-5, atol=1e-6)
    assert paged_index(q, index_cache, weights, *batch, 75) is None
