"""The schedule and AdamW against their closed forms. The other optimizers: test_rules.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.config import validate
from slipstream.config.train import OptimConfig
from slipstream.trainer.optim import empty_optimizer_tensors, learning_rate, make_optimizer, optimizer_tensors, set_learning_rate


def optim(**values) -> OptimConfig:
    return validate(OptimConfig, {"lr": 1.0, **values})


def test_warm_up_is_linear_and_reaches_the_rate_at_its_last_step():
    assert [learning_rate(optim(warmup_steps=4), step, 10) for step in (1, 2, 4, 5, 10)] == [0.25, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_starts_at_the_rate_halves_midway_and_ends_at_the_final_fraction(schedule):
    config = optim(schedule=schedule, warmup_steps=2, final_fraction=0.1)
    assert learning_rate(config, 2, 10) == 1.0
    assert learning_rate(config, 6, 10) == pytest.approx(0.55)
    assert learning_rate(config, 10, 10) == pytest.approx(0.1)
    assert learning_rate(config, 11, 10) == pytest.approx(0.1)
    rates = [learning_rate(config, step, 10) for step in range(2, 11)]
    assert rates == sorted(rates, reverse=True)


def test_the_cosine_is_a_cosine():
    assert learning_rate(optim(schedule="cosine"), 1, 4) == pytest.approx((1 + 2**-0.5) / 2)


def test_a_warm_up_as_long_as_the_run_does_not_divide_by_zero():
    assert learning_rate(optim(schedule="linear", warmup_steps=4), 4, 4) == 1.0


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_weight_decay_touches_matrices_and_expert_stacks_but_not_norms_biases_or_frozen_parameters(kind):
    shapes = {"out": (3, 2), "experts.down": (4, 3, 2), "norm": (3,), "experts.down_bias": (4, 2), "frozen": (3, 2)}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    parameters["frozen"].requires_grad_(False)
    optimizer = make_optimizer(parameters, {}, optim(type=kind, weight_decay=0.5, lr=0.1))
    for p in parameters.values():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    assert [p.detach().max().item() for p in parameters.values()] == pytest.approx([0.95, 0.95, 1.0, 1.0, 1.0])


def test_the_first_step_of_adam_moves_by_the_rate_against_the_sign_of_the_gradient():
    parameter = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    optimizer = make_optimizer({"w": parameter}, {}, optim())
    set_learning_rate(optimizer, 0.25)
    parameter.grad = torch.tensor([5.0, -0.01, 0.0])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.75, 1.25, 1.0]))


def test_optimizer_state_survives_a_round_trip_through_named_tensors():
    def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.ones(2, 2))
        return parameter, make_optimizer({"w": parameter}, {}, optim(lr=0.1))

    def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, scale: float) -> None:
        parameter.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * scale
        optimizer.step()

    (a, first), (b, second) = make(), make()
    step(a, first, 1.0)
    stored = {key: value.clone() for key, value in optimizer_tensors(first, {a: "w"}).items()}
    b.data.copy_(a.data)
    given = empty_optimizer_tensors(second, {b: "w"}, {key: (value.dtype, tuple(value.shape)) for key, value in stored.items()})
    assert given.keys() == stored.keys()
    for key, value in stored.items():
        given[key].copy_(value)
    step(a, first, -0.3)
    step(b, second, -0.3)
    assert sorted(stored) == ["exp_avg/w", "exp_avg_sq/w", "step/w"]
    assert torch.equal(a, b)
