"""Whether a model can be trained as [trainer] asks. Torch-free: the launcher refuses a run before anything starts."""

from __future__ import annotations

from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models.foreign.spec import HfSpec
from slipstream.models.spec import ModelSpec


def check_trains(config: TrainerConfig, optim: OptimConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: settings that contradict each other, or that the model has nothing for."""
    if isinstance(spec, HfSpec):
        _check_impl(config, optim, spec)
    if config.lora is not None and config.parallel.pp > 1:
        raise ConfigError(
            f"[trainer.lora] trains adapters that every process has whole, and trainer.parallel.pp = {config.parallel.pp} gives each "
            "process some of the layers: set pp = 1, or leave [trainer.lora] out"
        )
    if config.balance_rate and config.freeze_router:
        raise ConfigError(
            f"trainer.balance_rate = {config.balance_rate} moves the routing bias, and trainer.freeze_router = true holds the router: "
            "choose one of them"
        )
    if config.balance_rate and not spec.router_bias:
        raise ConfigError(
            f"trainer.balance_rate = {config.balance_rate}: loss-free balancing moves a routing bias, and models of the family "
            f"{spec.family!r} have none; set trainer.balance_rate = 0 (or trainer.freeze_router = true against drift)"
        )
    if config.aux_loss and (config.freeze_router or config.lora is not None or not spec.moe_layers):
        held = "trainer.freeze_router = true holds the router" if config.freeze_router else "no adapter of trainer.lora is of the router"
        why = held if spec.moe_layers else f"{spec.family!r} has no experts"
        raise ConfigError(f"trainer.aux_loss = {config.aux_loss} evens out experts, and {why}: set trainer.aux_loss = 0")


def _check_impl(config: TrainerConfig, optim: OptimConfig, spec: HfSpec) -> None:
    """With transformers' own modules (`model.impl = "hf"`) nothing works that needs to know the parts of a model."""
    problem = ""
    if config.parallel.processes > 1:
        problem = f"trainer.parallel.processes = {config.parallel.processes}: sharding knows our own layers only; set one process"
    elif config.dtype == "float8":
        problem = 'trainer.dtype = "float8": the precision map knows our own matrices only; set "bfloat16" or "float32"'
    elif optim.type == "muon":
        problem = 'optim.type = "muon": it must know which parameters are matrices side by side; set "adamw", "sgd" or "sign_sgd"'
    elif config.lora is not None:
        problem = "trainer.lora: adapters go by the names and shapes of our own layers; leave [trainer.lora] out"
    elif config.balance_rate:
        problem = f"trainer.balance_rate = {config.balance_rate}: it must know the routing bias; set 0"
    elif config.aux_loss:
        problem = f"trainer.aux_loss = {config.aux_loss}: it must know the router's logits; set 0"
    if problem:
        raise ConfigError(f'{problem}, or use a family that slipstream has ({spec.family!r} runs with model.impl = "hf")')
