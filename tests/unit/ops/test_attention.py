"""Attention within the documents of a packed row: values, gradients, isolation. The paged form is compared with it."""

import pytest
import torch

from slipstream.errors import StateError
from slipstream.ops import DocLayout, Sight, doc_attention, paged_attention, write_kv
from slipstream.ops.attention import doc_attention_reference
from tests.unit.ops.helpers import naive_doc_attention, naive_sight

ROWS = [[0, 1], [0, 5, 5, 6, 14, 37], [0, 49, 97, 145, 200], [0, 130], list(range(0, 70, 7))]
HEADS = [(4, 2, 16), (3, 3, 8), (4, 1, 40)]


def _row(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(tokens, n, dim, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("starts", ROWS)
@pytest.mark.parametrize("op", [doc_attention, lambda *args: doc_attention_reference(*args[:3], DocLayout(args[3]), args[4])])
def test_values_and_gradients_equal_one_softmax_a_document(op, starts, heads):
    row = _row(starts[-1], *heads)
    ours, naive = op(*row, starts, 0.4), naive_doc_attention(*row, starts, 0.4)
    torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, row, slope), torch.autograd.grad(naive, row, slope), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_the_reference_passes_gradcheck_in_double_precision():
    row = _row(11, 4, 2, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: doc_attention(q, k, v, [0, 4, 5, 11], 0.5), row)


def test_a_document_is_bitwise_the_same_alone_and_among_others():
    starts = [0, 40, 90, 97]
    q, k, v = _row(97, 4, 2, 16)
    packed = doc_attention(q, k, v, starts, 0.3)
    slope = torch.randn_like(packed)
    grads = torch.autograd.grad(packed, (q, k, v), slope)
    alone = [x[40:90].detach().requires_grad_() for x in (q, k, v)]
    single = doc_attention(*alone, [0, 50], 0.3)
    assert torch.equal(single, packed[40:90])
    for a, b in zip(torch.autograd.grad(single, alone, slope[40:90]), grads, strict=True):
        assert torch.equal(a, b[40:90])


def test_what_happens_in_one_document_or_in_the_future_is_never_seen():
    q, k, v = (x.detach() for x in _row(60, 2, 2, 8))
    before = doc_attention(q, k, v, [0, 20, 60], 0.3)
    k[20:], v[20:] = torch.nan, torch.nan
    k[15:20] += 1.0
    after = doc_attention(q, k, v, [0, 20, 60], 0.3)
    assert torch.equal(before[:15], after[:15])
    assert after[:20].isfinite().all()
    assert not torch.equal(before[15:20], after[15:20])


def test_a_layout_is_built_once_and_serves_strided_slices_of_a_fused_projection():
    layout = DocLayout(torch.tensor([0, 9, 30], dtype=torch.int32))
    fused = torch.randn(30, 8 * 16, requires_grad=True)
    q, k, v = (x.unflatten(1, (-1, 16)) for x in fused.split([64, 32, 32], dim=1))
    out = doc_attention(q, k, v, layout, 0.25)
    torch.testing.assert_close(out, naive_doc_attention(q, k, v, [0, 9, 30], 0.25), rtol=1e-5, atol=1e-5)
    (ours,) = torch.autograd.grad(out.square().sum(), fused, retain_graph=True)
    (naive,) = torch.autograd.grad(naive_doc_attention(q, k, v, [0, 9, 30], 0.25).square().sum(), fused)
    torch.testing.assert_close(ours, naive, rtol=1e-4, atol=5e-5)


def test_bf16_rows_work_and_stay_bf16():
    q, k, v = _row(50, 4, 2, 16)
    rough = doc_attention(*(x.bfloat16() for x in (q, k, v)), [0, 13, 50], 0.3)
    assert rough.dtype is torch.bfloat16
    torch.testing.assert_close(rough.float(), doc_attention(q, k, v, [0, 13, 50], 0.3), rtol=5e-2, atol=5e-2)


def test_decoding_from_the_paged_cache_gives_what_training_computes():
    tokens, block = 75, 16
    q, k, v = (x.detach() for x in _row(tokens, 4, 2, 32))
    cache = torch.zeros(2, 8, block, 2, 32)
    table = torch.randperm(8)[: -(-tokens // block)][None].int()
    place = torch.arange(tokens)
    write_kv(k, v, cache[0], cache[1], table[0, place // block].long() * block + place % block)
    whole = doc_attention(q, k, v, [0, tokens], 0.2)
    for position in (0, 15, 16, 74):
        context = torch.tensor([position + 1], dtype=torch.int32)
        row = paged_attention(q[position, None], cache[0], cache[1], table, torch.tensor([0, 1], dtype=torch.int32), context, 0.2)
        torch.testing.assert_close(row[0], whole[position], rtol=1e-5, atol=1e-6)


SIGHTS = [(0, True), (1, False), (5, False), (5, True), (1000, True)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("window", "with_sinks"), SIGHTS)
def test_windows_and_sinks_equal_one_softmax_a_query(window, with_sinks, heads):
    starts = [0, 3, 3, 21, 60]
    leaves = _row(60, *heads)
    sinks = torch.randn(heads[0], requires_grad=True) if with_sinks else None
    ours = doc_attention(*leaves, starts, 0.4, Sight(window, sinks))
    naive = torch.cat([naive_sight(*(x[a:b] for x in leaves), 0.4, window, sinks) for a, b in ((0, 3), (3, 21), (21, 60))])
    torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)
    leaves += [sinks] if sinks is not None else []
    slope = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, leaves, slope), torch.autograd.grad(naive, leaves, slope), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "with_sinks"), SIGHTS)
def test_windows_and_sinks_over_the_paged_cache_give_what_training_computes(window, with_sinks, dtype):
    """Two sequences: a chunk of 30 queries behind 45 tokens, and one that decodes."""
    lengths, block = (75, 33), 16
    sight = Sight(window, torch.randn(4).to(dtype) if with_sinks else None)
    rows = [[x.detach().to(dtype) for x in _row(n, 4, 2, 32)] for n in lengths]
    cache, table = torch.zeros(2, 10, block, 2, 32, dtype=dtype), torch.randperm(10).int().view(2, 5)
    for (_, k, v), blocks in zip(rows, table, strict=True):
        place = torch.arange(len(k))
        write_kv(k, v, cache[0], cache[1], blocks[place // block].long() * block + place % block)
    queries = torch.cat((rows[0][0][45:], rows[1][0][32:]))
    starts, context = torch.tensor([0, 30, 31], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    paged = paged_attention(queries, cache[0], cache[1], table, starts, context, 0.2, sight)
    whole = torch.cat([doc_attention(*row, [0, len(row[0])], 0.2, sight)[n:] for row, n in zip(rows, (45, 32), strict=True)])
    assert paged.dtype is dtype
    torch.testing.assert_close(paged, whole, rtol=1e-5, atol=1e-6)


def test_an_empty_row_is_an_empty_answer():
    assert doc_attention(*_row(0, 2, 1, 8), [0], 1.0).shape == (0, 2, 8)


@pytest.mark.parametrize("starts", [[1, 5], [0, 6, 4, 5], []])
def test_doc_starts_that_do_not_ascend_from_0_are_refused(starts):
    with pytest.raises(StateError, match="doc_starts must ascend from 0"):
        DocLayout(starts)


def test_documents_that_do_not_cover_the_row_are_refused():
    with pytest.raises(StateError, match="documents of 5 tokens"):
        doc_attention(*_row(6, 2, 1, 8), [0, 5], 1.0)
    q, k, v = _row(5, 3, 2, 8)
    with pytest.raises(StateError, match=r"expected \[T, H, d\]"):
        doc_attention(q, k, v, [0, 5], 1.0)
