"""Whether a model can be trained as [trainer] asks. Torch-free: the launcher refuses a run before anything starts."""

from __future__ import annotations

from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec


def check_trains(config: TrainerConfig, optim: OptimConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: settings that contradict each other, or that the model has nothing for."""
    processes = config.parallel.processes
    if processes > 1 and (config.dtype == "float8" or optim.type == "muon"):
        what = 'trainer.dtype = "float8"' if config.dtype == "float8" else 'optim.type = "muon"'
        raise ConfigError(f"{what} needs whole matrices, and trainer.parallel.processes = {processes} shards them: set one process")
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
