"""Which optimizer a run has, its learning-rate schedule, and its state by name. Knows nothing of losses, batches or files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.train import OptimConfig
from slipstream.trainer.away import Away
from slipstream.trainer.rules import Rule, RuleOptimizer, adamw, muon, sgd, sign_sgd


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """The rate of optimizer step `step` (the first is 1): a pure function, so a resumed run needs no scheduler state.

    Linear warm-up reaches `lr` at step `warmup_steps`; what follows ends at `lr * final_fraction` at step `max_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.final_fraction + (1 - config.final_fraction) * remaining)


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], columns: Mapping[str, Sequence[int]], config: OptimConfig, away: Away | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that train, with weight decay on matrices and expert stacks only.

    `columns` names the parameters that Muon orthogonalises, and the widths of the matrices side by side in each.
    AdamW (arXiv 1711.05101) with float32 moments in memory is torch's own, in one kernel; everything else is in `trainer.rules`.
    `away`: where moments are between steps.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if config.type == "adamw" and config.moments == "float32" and away is None:
        groups = _groups(trained, config)
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    if config.type == "muon":
        matrices = {name: p for name, p in trained.items() if name in columns}
        rest = {name: p for name, p in trained.items() if name not in columns}
        widths: dict[Tensor, Sequence[int]] = {p: columns[name] for name, p in matrices.items()}
        groups = _groups(matrices, config, muon(config, widths)) + _groups(rest, config, adamw(config))
    else:
        groups = _groups(trained, config, {"adamw": adamw, "sgd": sgd, "sign_sgd": sign_sgd}[config.type](config))
    return RuleOptimizer(groups, config.lr, away)


def _groups(parameters: Mapping[str, nn.Parameter], config: OptimConfig, rule: Rule | None = None) -> list[dict[str, Any]]:
    """Matrices, which decay, and the rest (the biases of experts lie in a matrix, and are none); by mesh, since a fused call takes
    tensors of one mesh."""
    found: dict[tuple[float, object], list[nn.Parameter]] = {}
    for name, p in parameters.items():
        decays = p.ndim >= 2 and not name.endswith("bias")
        found.setdefault((config.weight_decay if decays else 0.0, getattr(p, "device_mesh", None)), []).append(p)
    own = {} if rule is None else {"rule": rule}
    return [{"params": same, "weight_decay": decay, **own} for (decay, _), same in found.items()]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The moments and step counts as '<state>/<parameter name>': what a checkpoint stores. Empty before the first step."""
    return {f"{key}/{names[p]}": value for p, state in optimizer.state.items() for key, value in state.items()}


def empty_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Give the optimizer state without values yet, and return it as `optimizer_tensors` does.

    `kinds`: type and whole shape under '<state>/<parameter name>', also of parameters that are not here.
    """
    optimizer.state.clear()
    parameters = {name: p for p, name in names.items()}
    for key, (dtype, shape) in kinds.items():
        state, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is not None:
            optimizer.state[parameter][state] = torch.empty_like(parameter, dtype=dtype) if shape else torch.empty((), dtype=dtype)
    return optimizer_tensors(optimizer, names)
