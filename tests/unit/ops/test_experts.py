"""Experts: values and gradients equal those of a loop over tokens; nothing is dropped."""

import pytest
import torch

from slipstream.errors import StateError
from slipstream.ops import clamped_experts, combine_experts, experts
from slipstream.ops.experts import experts_reference
from tests.unit.ops.helpers import expert_inputs, naive_clamped_experts, naive_experts


@pytest.mark.parametrize("op", [experts, experts_reference])
@pytest.mark.parametrize("sizes", [(1, 4, 2, 16, 8), (30, 4, 2, 32, 24), (150, 2, 1, 8, 40), (9, 6, 6, 24, 16), (400, 2, 2, 16, 24)])
def test_values_and_gradients_equal_a_loop_over_tokens(op, sizes):
    x, ids, gates, gate_up, down = expert_inputs(*sizes)
    leaves = [p.requires_grad_() for p in (x, gates, gate_up, down)]
    ours, naive = op(x, ids, gates, gate_up, down), naive_experts(x, ids, gates, gate_up, down)
    torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, leaves, slope), torch.autograd.grad(naive, leaves, slope), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_reference_passes_gradcheck_in_double_precision(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", _looped_mm)  # grouped_mm knows no fp64
    x, ids, gates, gate_up, down = expert_inputs(6, 3, 2, 4, 3, torch.float64)
    leaves = [p.requires_grad_() for p in (x, gates, gate_up, down)]
    assert torch.autograd.gradcheck(lambda x, g, w, v: experts(x, ids, g, w, v), leaves)


def _looped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    bounds = [0, *offs.tolist()]
    return torch.cat([x[a:b] @ w for a, b, w in zip(bounds[:-1], bounds[1:], weight, strict=True)])


def test_experts_that_no_token_chose_get_a_zero_gradient():
    x, ids, gates, gate_up, down = expert_inputs(20, 5, 2, 16, 16)
    ids = ids.clamp(max=3)
    gate_up.requires_grad_(), down.requires_grad_()
    experts(x, ids, gates, gate_up, down).sum().backward()
    assert gate_up.grad is not None and down.grad is not None
    assert not gate_up.grad[4].any() and not down.grad[4].any()
    assert all(gate_up.grad[e].any() for e in ids.unique().tolist())


def test_the_gradient_of_a_sum_works_although_it_has_no_real_strides():
    x, ids, gates, gate_up, down = expert_inputs(20, 4, 2, 16, 16)
    for op in (experts, experts_reference):
        (grad,) = torch.autograd.grad(op(x.requires_grad_(), ids, gates, gate_up, down).sum(), x)
        assert grad.isfinite().all()


def test_gates_scale_the_output_and_a_gate_of_zero_silences_its_expert():
    x, ids, gates, gate_up, down = expert_inputs(12, 4, 2, 16, 16)
    gates[:, 1] = 0
    once = experts(x, ids[:, :1], gates[:, :1], gate_up, down)
    torch.testing.assert_close(experts(x, ids, gates, gate_up, down), once)
    torch.testing.assert_close(experts(x, ids, 3 * gates, gate_up, down), 3 * once)


def test_int32_and_uint8_ids_are_accepted():
    x, ids, gates, gate_up, down = expert_inputs(12, 4, 2, 16, 16)
    expected = experts(x, ids, gates, gate_up, down)
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(experts(x, ids.to(dtype), gates, gate_up, down), expected)


def test_bf16_experts_work_and_stay_bf16():
    inputs = expert_inputs(12, 4, 2, 16, 16)
    rough = experts(*[x.bfloat16() if x.is_floating_point() else x for x in inputs])
    assert rough.dtype is torch.bfloat16
    torch.testing.assert_close(rough.float(), experts(*inputs), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("sizes", [(1, 4, 2, 16, 8), (30, 4, 2, 32, 24), (9, 6, 6, 24, 16)])
def test_clamped_experts_equal_a_loop_over_tokens(sizes):
    x, ids, gates, gate_up, down = expert_inputs(*sizes)
    biases = [torch.randn(w.shape[0], w.shape[2]) for w in (gate_up, down)]
    leaves = [p.requires_grad_() for p in (x, gates, gate_up, biases[0], down, biases[1])]
    ours = clamped_experts(x, ids, *leaves[1:], 2.0, 0.8)
    naive = naive_clamped_experts(x, ids, *leaves[1:], 0.8)
    torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, leaves, slope), torch.autograd.grad(naive, leaves, slope), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, (9, 6, 3, 16, 8)), (torch.bfloat16, (9, 6, 3, 16, 8)), (torch.float32, (9, 6, 3, 12, 8))]
)
def test_results_of_experts_that_were_computed_one_by_one_combine_to_the_same_bits(dtype, sizes):
    x, ids, gates, gate_up, down = expert_inputs(*sizes, dtype=dtype)
    ids[0, 2] = ids[0, 0]
    one = experts(x.repeat_interleave(3, 0), ids.flatten().unsqueeze(1), gates.new_ones(27, 1), gate_up, down)
    combined = combine_experts(one.view(9, 3, -1), ids, gates, 6)
    expected = experts(x, ids, gates, gate_up, down)
    assert torch.equal(combined, expected) if sizes[3] % 8 == 0 else torch.allclose(combined, expected, rtol=0, atol=1e-6)
    assert combine_experts(one.view(9, 3, -1)[:0], ids[:0], gates[:0], 6).shape == (0, sizes[3])


def test_an_expert_that_is_not_there_is_refused_when_results_are_combined():
    with pytest.raises(StateError, match="expert id"):
        combine_experts(torch.ones(1, 1, 8), torch.tensor([[6]]), torch.ones(1, 1), 6)
