"""Weights that are multiplied in FP8: the recipe of each of the three products, and no way around it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import StateError
from slipstream.ops import experts
from slipstream.ops.fp8 import ACTIVATION, TOKENS, WEIGHT, quantise
from slipstream.ops.fp8_weight import Fp8Errors, Fp8Weight
from tests.unit.ops.test_fp8 import randn, relative, rounded


def weight(values: Tensor, columns: tuple[int, ...] | None = None, power_of_two: bool = False) -> Fp8Weight:
    return Fp8Weight.of(nn.Parameter(values.clone()), columns or (values.shape[-1],), power_of_two, Fp8Errors())


@pytest.mark.parametrize("power", [False, True])
def test_forward_and_both_gradients_follow_the_recipe(power):
    x, w, dy = randn(140, 200).requires_grad_(), weight(randn(200, 150, seed=1), None, power), randn(140, 150, seed=2, spread=2.0)
    y = torch.mm(x, w)
    y.backward(dy)
    rounded_x, rounded_w = rounded(x.detach(), ACTIVATION, power), rounded(w.detach(), WEIGHT, power)
    assert relative(y, rounded_x @ rounded_w) < 1e-6
    assert relative(x.grad, rounded(dy, ACTIVATION, power) @ rounded_w.T) < 1e-6
    assert relative(w.grad, rounded(rounded_x.float(), TOKENS, power).T @ rounded(dy, TOKENS, power)) < 1e-6


def test_a_parameter_that_is_turned_into_one_is_quantised_from_the_values_that_it_has_when_it_is_used():
    """As FSDP does: forward with values that are gone by the backward pass, and there again."""
    values, dy, x = randn(200, 150, seed=1), randn(30, 150, seed=2), randn(30, 200).requires_grad_()
    kept, x_kept = weight(values, (40, 110)), x.detach().clone().requires_grad_()
    torch.mm(x_kept, kept).backward(dy)
    held = nn.Parameter(torch.zeros_like(values))
    Fp8Weight.turn_into(held, (40, 110), False, Fp8Errors())
    held.data.copy_(values)
    y = torch.mm(x, held)
    held.data.zero_()
    held.data.copy_(values)
    y.backward(dy)
    assert isinstance(held, Fp8Weight) and torch.equal(y, torch.mm(x, kept))
    assert torch.equal(held.grad, kept.grad) and torch.equal(x.grad, x_kept.grad)
    held.data.mul_(2)
    assert torch.equal(torch.mm(x, held), 2 * y)


def test_gradients_are_near_the_exact_ones():
    x, dy = randn(256, 256, spread=0.0).requires_grad_(), randn(256, 256, seed=2, spread=0.0)
    w = weight(randn(256, 256, seed=1, spread=0.0))
    torch.mm(x, w).backward(dy)
    assert relative(x.grad, dy @ w.detach().T) < 0.05 and relative(w.grad, x.detach().T @ dy) < 0.06


@pytest.mark.parametrize("columns", [(40, 110), (128, 22), (10, 20, 120)])
def test_matrices_side_by_side_are_multiplied_as_if_they_were_apart(columns):
    values, dy = randn(200, 150, seed=1, spread=2.0), randn(30, 150, seed=2)
    together, x = weight(values, columns), randn(30, 200).requires_grad_()
    apart, x_apart = [weight(part) for part in values.split(columns, 1)], x.detach().clone().requires_grad_()
    y = torch.mm(x, together)
    y.backward(dy)
    y_apart = torch.cat([torch.mm(x_apart, w) for w in apart], 1)
    y_apart.backward(dy)
    assert torch.equal(y, y_apart)
    assert torch.equal(together.grad, torch.cat([w.grad for w in apart], 1))
    torch.testing.assert_close(x.grad, x_apart.grad, rtol=1e-5, atol=1e-5)


def test_experts_are_multiplied_each_by_itself_and_one_without_tokens_has_no_gradient():
    values, x, dy = torch.stack([randn(40, 36, seed=e) for e in range(4)]), randn(20, 40), randn(20, 36, seed=9)
    stack, x_grouped = weight(values), x.clone().requires_grad_()
    y = F.grouped_mm(x_grouped, stack, offs=torch.tensor([3, 3, 15, 20], dtype=torch.int32))
    y.backward(dy)
    for expert, (start, end) in enumerate([(0, 3), (3, 3), (3, 15), (15, 20)]):
        single, part = weight(values[expert]), x[start:end].clone().requires_grad_()
        torch.mm(part, single).backward(dy[start:end])
        assert torch.equal(stack.grad[expert], single.grad)
        assert torch.equal(x_grouped.grad[start:end], part.grad)
    assert not stack.grad[1].any()


def test_an_expert_layer_takes_its_fp8_weights_also_where_a_native_kernel_could_serve():
    x, gates = randn(12, 32), torch.full((12, 2), 0.5)
    ids = torch.arange(24).view(12, 2) % 4
    gate_up, down = torch.stack([randn(32, 32, seed=e) for e in range(4)]), torch.stack([randn(16, 32, seed=e + 9) for e in range(4)])
    exact = experts(x, ids, gates, gate_up, down)
    y = experts(x, ids, gates, weight(gate_up, (16, 16)), weight(down))
    assert 0.005 < relative(y, exact) < 0.15


def test_a_bias_is_added():
    x, w, bias = randn(5, 30), weight(randn(30, 7, seed=1)), torch.arange(7.0)
    assert torch.equal(torch.addmm(bias, x, w), torch.mm(x, w) + bias)


def test_activations_keep_their_dtype_and_the_gradient_of_the_weight_is_float32():
    x, w = randn(9, 30).bfloat16().requires_grad_(), weight(randn(30, 7, seed=1).bfloat16())
    y = torch.mm(x, w)
    y.backward(torch.ones_like(y) / 3)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert not torch.equal(w.grad, w.grad.bfloat16().float())


def test_a_frozen_weight_takes_no_gradient():
    frozen = Fp8Weight.of(nn.Parameter(randn(30, 7), requires_grad=False), (7,), False, Fp8Errors())
    x = randn(5, 30).requires_grad_()
    torch.mm(x, frozen).sum().backward()
    assert frozen.grad is None and x.grad is not None


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.matmul(x, w),
        lambda x, w: F.linear(x, w),
        lambda x, w: torch.einsum("tk,kn->tn", x, w),
        lambda x, w: w.data_ptr(),
    ],
)
def test_no_product_leaves_fp8_silently(product):
    with pytest.raises(StateError, match="multiplied in FP8"):
        product(randn(6, 6), weight(randn(6, 6)))


def test_new_values_count_once_they_are_quantised():
    w, x = weight(randn(30, 7)), randn(5, 30)
    before = torch.mm(x, w)
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(torch.mm(x, w), before)
    w.requantise()
    assert torch.equal(torch.mm(x, w), before * 2)


def test_errors_are_norms_over_all_that_was_quantised_and_start_anew_when_taken():
    errors, a, b = Fp8Errors(), randn(3, 200, spread=3.0), 1e-9 * torch.ones(2, 200)
    b[:, 0] = 1.0
    for x in (a, b):
        errors.add("input", x, quantise(x, ACTIVATION))
    off = sum(float((rounded(x, ACTIVATION) - x).square().sum()) for x in (a, b)) / sum(float(x.square().sum()) for x in (a, b))
    lost = sum(int(((rounded(x, ACTIVATION) == 0) & (x != 0)).sum()) for x in (a, b)) / (5 * 200)
    error, underflow = errors.shares()["input"]
    assert error == pytest.approx(off**0.5, rel=1e-4) and underflow == pytest.approx(lost) and underflow > 0.2
    errors.reset()
    assert errors.shares() == {}
