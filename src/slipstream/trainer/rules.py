"""Update rules, each a function of (parameters, their states, rate), and the optimizer that applies them group by group.

State is kept in `optim.moments` between steps and computed with in float32; what a step uses is not rounded, what the next one finds is.
Parameters may be sharded over processes: most rules work on every element by itself, so on every shard; Muon takes matrices whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from slipstream.config.train import OptimConfig
from slipstream.parallel.fsdp import change_whole, local
from slipstream.trainer.away import Away

State = dict[str, Tensor]
Rule = Callable[[Sequence[Tensor], Sequence[State], float], None]
"""Changes parameters in place by their gradients; (parameters, state of each, rate)."""


class RuleOptimizer(torch.optim.Optimizer):
    """Groups of {"params", "weight_decay", "rule"}. Weight decay is decoupled: p -= lr · decay · p."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, away: Away | None = None) -> None:
        """`away`: where state is between steps, see there."""
        super().__init__(groups, {"lr": lr})
        self._away = away

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if self._away is None:
                self._change(group, trained)
                continue
            for p, following in zip_longest(trained, trained[1:]):
                if following is not None:
                    self._away.expect(following, self.state[following])
                self._change(group, [p])
                self._away.keep(p, self.state[p])

    def _change(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        group["rule"](params, [self.state[p] for p in params], group["lr"])


def adamw(config: OptimConfig) -> Rule:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2."""
    return partial(_each, partial(_adamw, config))


def sgd(config: OptimConfig) -> Rule:
    """b = momentum · b + g; p -= lr · b."""
    return partial(_each, partial(_sgd, config))


def sign_sgd(config: OptimConfig) -> Rule:
    """p -= lr · sign(mean of gradients) (Bernstein et al., "signSGD", 2018, algorithm 2)."""
    return partial(_each, partial(_sign_sgd, config))


def muon(config: OptimConfig, columns: Mapping[Tensor, Sequence[int]]) -> Rule:
    """p -= lr · 0.2 · sqrt(max(rows, columns)) · orthogonalised(Nesterov momentum), for each matrix and each expert by itself.

    Liu et al., "Muon is Scalable for LLM Training", 2025, equation 4; the factor gives the update the root mean square of AdamW's.
    `columns`: widths of the matrices side by side in each parameter.
    An expert that no token reached keeps its place: orthogonalising would bring what is left of its momentum to full size, step after step.

    Sharded over processes, experts are whole where they are. Of the other matrices each is put together, and orthogonalised, in one
    process.
    """
    return partial(_muon, config, columns)


def _each(rule: Callable[[Tensor, State, float], None], params: Sequence[Tensor], states: Sequence[State], lr: float) -> None:
    for p, state in zip(params, states, strict=True):
        rule(p, state, lr)


def _adamw(config: OptimConfig, p: Tensor, state: State, lr: float) -> None:
    grad = _gradient(p)
    state["step"] = state["step"] + 1 if "step" in state else torch.tensor(1.0)
    count = int(state["step"])
    mean = _moving_mean(config, state, "exp_avg", grad, config.beta1)
    square = _moving_mean(config, state, "exp_avg_sq", grad.square(), config.beta2)
    size = (square / (1 - config.beta2**count)).sqrt_().add_(config.eps)
    p.addcdiv_(mean, size, value=-lr / (1 - config.beta1**count))


def _sgd(config: OptimConfig, p: Tensor, state: State, lr: float) -> None:
    step = _gradient(p)
    if config.momentum:
        step = step + config.momentum * state["momentum"].float() if "momentum" in state else step
        state["momentum"] = _kept(config, step)
    p.add_(step, alpha=-lr)


def _sign_sgd(config: OptimConfig, p: Tensor, state: State, lr: float) -> None:
    grad = _gradient(p)
    mean = _moving_mean(config, state, "momentum", grad, config.momentum) if config.momentum else grad
    p.add_(mean.sign(), alpha=-lr)


def _muon(
    config: OptimConfig, columns: Mapping[Tensor, Sequence[int]], params: Sequence[Tensor], states: Sequence[State], lr: float
) -> None:
    stacks, matrices = ([i for i, p in enumerate(params) if p.ndim == ndim] for ndim in (3, 2))
    grads = [_gradient(p) for p in params]
    ahead = [g.lerp(_moving_mean(config, s, "momentum", g, config.momentum), config.momentum) for g, s in zip(grads, states, strict=True)]
    steps = [partial(_orthogonal_step, columns[p]) for p in params]
    for i in stacks:
        reached_E11 = local(grads[i]).flatten(-2).any(-1)[:, None, None]
        local(params[i]).add_(steps[i](local(ahead[i]) * reached_E11), alpha=-lr)
    changed = change_whole([ahead[i] for i in matrices], [steps[i] for i in matrices])
    for i, step in zip(matrices, changed, strict=True):
        local(params[i]).add_(step, alpha=-lr)


def _orthogonal_step(columns: Sequence[int], x: Tensor) -> Tensor:
    """Of `x` [..., m, n], matrices of the widths `columns` side by side: each orthogonalised and scaled."""
    return torch.cat([orthogonalised(matrix) * (0.2 * max(matrix.shape[-2:]) ** 0.5) for matrix in x.split(tuple(columns), -1)], -1)


def orthogonalised(x: Tensor) -> Tensor:
    """About U Vᵀ of x = U S Vᵀ [..., m, n]: five Newton-Schulz steps bring all but tiny singular values near 1 (0.68 to 1.13).

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, with the coefficients given there. In float32: bfloat16
    would do, but has no fast products on many CPUs.
    """
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    y = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-20)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y if wide is x else y.mT


def _moving_mean(config: OptimConfig, state: State, key: str, new: Tensor, decay: float) -> Tensor:
    """decay · old + (1 - decay) · new, from zero."""
    value = state[key].float().lerp(new, 1 - decay) if key in state else new * (1 - decay)
    state[key] = _kept(config, value)
    return value


def _kept(config: OptimConfig, value: Tensor) -> Tensor:
    return value.to(getattr(torch, config.moments))


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
