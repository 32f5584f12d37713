"""Which optimizer a run has, its learning-rate schedule, and its state by name. Knows nothing of losses, batches or files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.train import OptimConfig
from slipstream.parallel.fsdp import part
from slipstream.parallel.mesh import ALONE, Mesh
from slipstream.trainer.rules import RuleOptimizer, adamw, muon, sgd, sign_sgd


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
    parameters: Mapping[str, nn.Parameter], columns: Mapping[str, Sequence[int]], config: OptimConfig
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that train, with weight decay on matrices and expert stacks only.

    `columns` names the parameters that Muon orthogonalises, and the widths of the matrices side by side in each.
    AdamW (arXiv 1711.05101) with float32 moments is torch's own, in one kernel; everything else is in `trainer.rules`.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if config.type == "adamw" and config.moments == "float32":
        groups = [{"params": list(trained.values())}]
        return torch.optim.AdamW(_by_decay(groups, config), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    if config.type == "muon":
        groups = [{"params": [p], "rule": muon(config, columns[name])} for name, p in trained.items() if name in columns]
        groups.append({"params": [p for name, p in trained.items() if name not in columns], "rule": adamw(config)})
    else:
        rule = {"adamw": adamw, "sgd": sgd, "sign_sgd": sign_sgd}[config.type](config)
        groups = [{"params": list(trained.values()), "rule": rule}]
    return RuleOptimizer(_by_decay(groups, config), config.lr)


def _by_decay(groups: Sequence[Mapping[str, Any]], config: OptimConfig) -> list[dict[str, Any]]:
    """Each group cut into its matrices, which decay, and the rest; and by mesh, since a fused call takes tensors of one mesh."""
    found = []
    for group in groups:
        params: dict[tuple[float, object], list[nn.Parameter]] = {}
        for p in group["params"]:
            params.setdefault((config.weight_decay if p.ndim >= 2 else 0.0, getattr(p, "device_mesh", None)), []).append(p)
        found += [{**group, "params": same, "weight_decay": decay} for (decay, _), same in params.items()]
    return found


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The moments and step counts as '<state>/<parameter name>': what a checkpoint stores. Empty before the first step."""
    return {f"{key}/{names[p]}": value for p, state in optimizer.state.items() for key, value in state.items()}


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor], mesh: Mesh = ALONE
) -> None:
    """The inverse of `optimizer_tensors`: of whole tensors, of which a sharded parameter takes its part."""
    parameters = {name: p for p, name in names.items()}
    optimizer.state.clear()
    for key, value in tensors.items():
        state, _, name = key.partition("/")
        if mesh.config.pp > 1 and name not in parameters:
            continue  # of a layer that another process holds
        parameter = parameters[name]
        optimizer.state[parameter][state] = (part(value, parameter, mesh) if value.ndim else value).clone()
