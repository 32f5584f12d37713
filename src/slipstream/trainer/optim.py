"""AdamW and its learning-rate schedule. Knows nothing of losses, batches or files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from slipstream.config.train import OptimConfig
from slipstream.parallel.fsdp import part
from slipstream.parallel.mesh import ALONE, Mesh


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


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over the parameters that train, with weight decay on matrices and expert stacks only.

    Parameters that are sharded over different processes are groups of their own: one fused call takes tensors of one mesh.
    """
    params: dict[tuple[float, object], list[nn.Parameter]] = {}
    for p in parameters:
        if p.requires_grad:
            params.setdefault((config.weight_decay if p.ndim >= 2 else 0.0, getattr(p, "device_mesh", None)), []).append(p)
    groups = [{"params": same, "weight_decay": decay} for (decay, _), same in params.items()]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


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
        parameter = parameters[name]
        optimizer.state[parameter][state] = (part(value, parameter, mesh) if value.ndim else value).clone()
