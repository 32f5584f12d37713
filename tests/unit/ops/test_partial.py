"""Attention to the keys part by part equals attention to all of them at once, forward and backward."""

import pytest
import torch
from torch import Tensor

from slipstream.ops.partial import merge, partial_attention, partial_attention_backward

QUERIES, KEYS, DIM, SCALE = 7, 20, 6, 0.4


def whole(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """One softmax, written out."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).mul(SCALE).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 1, 0)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_parts_merge_into_the_whole_and_each_has_its_own_gradient(heads, with_sinks, order):
    q = torch.randn(QUERIES, heads[0], DIM, requires_grad=True)
    k, v = (torch.randn(KEYS, heads[1], DIM, requires_grad=True) for _ in range(2))
    sinks = torch.randn(heads[0]) if with_sinks else None
    seen = torch.rand(QUERIES, KEYS) < 0.4
    seen[:, 5:11] = False  # nothing of a part
    seen[2] = torch.arange(KEYS) == 13  # one key of one part only
    seen[:, 12] = True
    expected = whole(q, k, v, seen, sinks)
    parts = [(slice(0, 5), seen[:, :5]), (slice(5, 11), seen[:, 5:11]), (slice(11, 12), seen[:, 11:12]), (slice(12, 20), seen[:, 12:])]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    with torch.no_grad():
        for keys, mask in (parts[i] for i in order):
            merge(out, lse, *partial_attention(q, k[keys], v[keys], SCALE, mask))
        if sinks is not None:
            merge(out, lse, torch.zeros_like(out), sinks.expand_as(lse))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    slope = torch.randn_like(out)
    gradients = torch.autograd.grad(expected, (q, k, v), slope)
    delta, found = (out * slope).sum(-1), [torch.zeros_like(x) for x in (q, k, v)]
    for keys, mask in parts:
        dq, dk, dv = partial_attention_backward(q.detach(), k[keys].detach(), v[keys].detach(), lse, slope, delta, SCALE, mask)
        found[0] += dq
        found[1][keys], found[2][keys] = dk, dv
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_without_a_mask_all_is_seen():
    q, k, v = torch.randn(5, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    everything = partial_attention(q, k, v, 0.3, torch.ones(5, 9, dtype=torch.bool))
    for ours, masked in zip(partial_attention(q, k, v, 0.3, None), everything, strict=True):
        assert torch.equal(ours, masked)


def test_bfloat16_is_computed_in_float32():
    q, k, v = (torch.randn(n, 2, 8).bfloat16() for n in (3, 50, 50))
    out, lse = partial_attention(q, k, v, 0.3, None)
    assert out.dtype is lse.dtype is torch.float32
    torch.testing.assert_close(out, partial_attention(q.float(), k.float(), v.float(), 0.3, None)[0], rtol=0, atol=0)
