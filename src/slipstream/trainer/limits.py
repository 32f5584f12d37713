"""What the trainer cannot do with transformers' own modules (`model.impl = "hf"`). Torch-free: the launcher refuses a run before it
starts."""

from __future__ import annotations

from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models.foreign.spec import HfSpec
from slipstream.models.spec import ModelSpec


def check_impl(spec: ModelSpec, config: TrainerConfig, optim: OptimConfig) -> None:
    """Raises ConfigError, which names the setting: it needs to know the parts of a model that only our families tell."""
    if not isinstance(spec, HfSpec):
        return
    problem = ""
    if config.parallel.processes > 1:
        problem = f"trainer.parallel.processes = {config.parallel.processes}: sharding knows our own layers only; set one process"
    elif config.dtype == "float8":
        problem = 'trainer.dtype = "float8": the precision map knows our own matrices only; set "bfloat16" or "float32"'
    elif optim.type == "muon":
        problem = 'optim.type = "muon": it must know which parameters are matrices side by side; set "adamw", "sgd" or "sign_sgd"'
    elif config.balance_rate:
        problem = f"trainer.balance_rate = {config.balance_rate}: it must know the routing bias; set 0"
    if problem:
        raise ConfigError(f'{problem}, or use a family that slipstream has ({spec.family!r} runs with model.impl = "hf")')
