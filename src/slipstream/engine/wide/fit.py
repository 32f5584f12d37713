"""Whether engine processes can share the experts of a model as [engine.ep] asks, and what each then holds. Torch-free: refused before
anything starts."""

from __future__ import annotations

from slipstream.config.serve import EngineBase, EngineConfig, embedded
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec
from slipstream.parallel.placement import slots_per_rank


def params_here(spec: ModelSpec, config: EngineBase) -> int:
    """Parameters that one engine process holds."""
    if config.ranks == 1:
        return spec.num_params
    ep = embedded(config).ep
    elsewhere = spec.num_experts - slots_per_rank(spec.num_experts, ep.ranks, ep.redundant_experts)
    return spec.num_params - elsewhere * spec.expert_params * len(spec.moe_layers)


def check_wide(spec: ModelSpec, config: EngineConfig, impl: str = "auto") -> None:
    """Raises ConfigError with the keys, their values and what would fit."""
    ep = config.ep
    if ep.ranks == 1:
        return
    if impl == "hf":
        raise ConfigError(
            f'engine.ep.ranks = {ep.ranks} and model.impl = "hf": the experts of transformers\' own modules cannot be shared out; use '
            'model.impl = "auto" or engine.ep.ranks = 1'
        )
    if not spec.moe_layers:
        raise ConfigError(
            f"engine.ep.ranks = {ep.ranks} shares out experts, and this model of the family {spec.family!r} has none: leave out [engine.ep]"
            "; engine.replicas alone serves it with several processes"
        )
    if spec.num_experts < ep.ranks:
        raise ConfigError(
            f"engine.ep.ranks = {ep.ranks} and the {spec.num_experts} experts of the model: some processes would have none; use "
            f"engine.ep.ranks = {spec.num_experts} or less"
        )
    slots = slots_per_rank(spec.num_experts, ep.ranks, ep.redundant_experts)
    if slots > spec.num_experts:
        raise ConfigError(
            f"engine.ep.redundant_experts = {ep.redundant_experts} with engine.ep.ranks = {ep.ranks} makes {slots} places in each process "
            f"for {spec.num_experts} experts: {spec.num_experts - slots + ep.redundant_experts} or less leave none of them empty"
        )
