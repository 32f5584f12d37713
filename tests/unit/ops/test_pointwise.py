"""Gradients of RMS norm and rope equal those that autograd finds for the references; rope is a rotation."""

import pytest
import torch

from slipstream.ops import rms_norm, rope
from slipstream.ops.norm import rms_norm_reference
from slipstream.ops.rope import rope_reference


def _assert_equal_gradients(ours, theirs, leaves):
    slopes = [torch.randn_like(x) for x in ours]
    for a, b in zip(torch.autograd.grad(ours, leaves, slopes), torch.autograd.grad(theirs, leaves, slopes), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("shape", [(1, 8), (150, 96), (70, 4, 32), (3, 1, 24)])
def test_rms_norm_has_the_gradient_of_its_reference(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.rand(shape[-1], requires_grad=True)
    ours, theirs = rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(ours, theirs)
    _assert_equal_gradients([ours], [theirs], [x, weight])


def test_rms_norm_of_a_slice_of_a_fused_projection_has_its_gradient_in_the_right_place():
    fused, weight = torch.randn(9, 96, requires_grad=True), torch.rand(16, requires_grad=True)
    heads = fused[:, 32:].unflatten(1, (-1, 16))
    _assert_equal_gradients([rms_norm(heads, weight, 1e-5)], [rms_norm_reference(heads, weight, 1e-5)], [fused, weight])


def test_rms_norm_takes_the_gradient_of_a_part_of_something_wider():
    """Which is strided: the kernel reads a dense copy, which has to live until then."""
    x, weight = torch.randn(25, 8, requires_grad=True), torch.rand(8, requires_grad=True)
    wide = [torch.cat((norm(x, weight, 1e-5), x[:, :3]), -1) for norm in (rms_norm, rms_norm_reference)]
    _assert_equal_gradients(wide[:1], wide[1:], [x, weight])


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_rms_norm_gives_unit_mean_square_whatever_the_scale(scale):
    normed = rms_norm(torch.randn(5, 64) * scale, torch.ones(64), 1e-12)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(5))


@pytest.mark.parametrize("rotary", [32, 8])
def test_rope_has_the_gradient_of_its_reference(rotary):
    q, k = torch.randn(9, 4, 32, requires_grad=True), torch.randn(9, 2, 32, requires_grad=True)
    cos, sin = torch.randn(9, rotary), torch.randn(9, rotary)
    _assert_equal_gradients(rope(q, k, cos, sin), rope_reference(q, k, cos, sin), [q, k])


def test_rope_needs_no_gradient_in_both_inputs():
    q, k = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 1, 8)
    (grad,) = torch.autograd.grad(rope(q, k, torch.randn(3, 8), torch.randn(3, 8))[0].sum(), q)
    assert grad.isfinite().all()


def test_rope_keeps_lengths_and_makes_scores_depend_on_the_distance_only():
    angle = torch.arange(40.0)[:, None] / 10 ** torch.linspace(0, 3, 8)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    q, k = torch.randn(2, 1, 1, 16).expand(2, 40, 1, 16)
    q_turned, k_turned = rope(q, k, cos, sin)
    torch.testing.assert_close(q_turned.norm(dim=-1), q.norm(dim=-1))
    scores = q_turned[:, 0] @ k_turned[:, 0].T
    torch.testing.assert_close(scores.diagonal(5), scores[0, 5].expand(35), rtol=1e-4, atol=1e-5)
