"""bf16 on the CPU: norm, rotation and attention are computed in fp32 and rounded once, so that trainer and engine round alike."""

from __future__ import annotations

import torch

from slipstream.ops import doc_attention, paged_attention, rms_norm, rope
from tests.unit.ops.helpers import paged_inputs


def _bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_norm_in_bfloat16_is_the_fp32_norm_rounded_once_with_gradients_in_bfloat16():
    x, weight = _bf16(7, 16, seed=0).requires_grad_(), _bf16(16, seed=1).requires_grad_()
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype is torch.bfloat16
    wide, wide_weight = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    exact = rms_norm(wide, wide_weight, 1e-6)
    assert torch.equal(out, exact.bfloat16())
    push = _bf16(7, 16, seed=2)
    out.backward(push)
    exact.backward(push.float())
    assert torch.equal(x.grad, wide.grad.bfloat16())
    assert torch.equal(weight.grad, wide_weight.grad.bfloat16())


def test_a_rotation_in_bfloat16_is_the_fp32_rotation_rounded_once():
    q, k, angles = _bf16(5, 4, 16, seed=3), _bf16(5, 2, 16, seed=4), torch.randn(5, 8, generator=torch.Generator().manual_seed(5))
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    for rough, exact in zip(rope(q, k, cos, sin), rope(q.float(), k.float(), cos, sin), strict=True):
        assert torch.equal(rough, exact.bfloat16())


def test_document_attention_in_bfloat16_is_the_fp32_attention_rounded_once():
    q, k, v = _bf16(9, 4, 16, seed=6), _bf16(9, 2, 16, seed=7), _bf16(9, 2, 16, seed=8)
    rough = doc_attention(q, k, v, [0, 4, 9], 0.25)
    assert torch.equal(rough, doc_attention(q.float(), k.float(), v.float(), [0, 4, 9], 0.25).bfloat16())


def test_paged_attention_over_a_bfloat16_cache_is_the_fp32_attention_over_its_values_rounded_once():
    for head_dim, contexts in ((16, [1, 64, 65]), (24, [130, 7, 63]), (64, [200, 128, 3])):
        inputs = paged_inputs([1, 3, 2], [contexts[0], max(3, contexts[1]), max(2, contexts[2])], 6, 2, head_dim, 8)
        halves = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
        exact = paged_attention(*[x.float() if x.is_floating_point() else x for x in halves], scale=0.2)
        assert torch.equal(paged_attention(*halves, scale=0.2), exact.bfloat16())
