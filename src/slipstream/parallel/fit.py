"""Whether a model can be spread as [trainer.parallel] asks. Torch-free: the launcher refuses a run before anything starts."""

from __future__ import annotations

from slipstream.config.parallel import ParallelConfig
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec
from slipstream.parallel.stages import stages


def check_fits(config: ParallelConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: experts, heads or layers cannot be shared by so many processes; says which combination can."""

    problem = misfit(config, spec, config.cp, config.ep, config.pp)
    if problem:
        nearest = config.nearest(lambda cp, ep, pp: not misfit(config, spec, cp, ep, pp))
        raise ConfigError(f"trainer.parallel: {problem}. The nearest that fits: {nearest}")


def misfit(config: ParallelConfig, spec: ModelSpec, cp: int, ep: int, pp: int) -> str:
    """Why the model cannot be spread by these sizes; '' when it can."""
    return _problem(spec, config.cp_method, cp, ep) or _pipeline_problem(spec, pp, config.pp_stages)


def _problem(spec: ModelSpec, cp_method: str, cp: int, ep: int) -> str:
    if ep > 1 and not spec.moe_layers:
        return f"ep = {ep} shares out experts, and this model of the family {spec.family!r} has none"
    if ep > 1 and spec.num_experts % ep:
        return f"ep = {ep} does not divide the {spec.num_experts} experts of the model"
    if cp > 1 and cp_method == "ulysses" and spec.indexer is not None:
        return (
            f"cp = {cp} with cp_method = 'ulysses' gives each process some of the heads of all tokens, and the sparse attention of "
            f"{spec.family!r} chooses for each token, in the process that has it (cp_method = 'all_gather' or 'ring' can)"
        )
    copies = spec.num_kv_heads < cp and not cp % spec.num_kv_heads
    if cp_method == "ulysses" and (spec.num_heads % cp or (spec.num_kv_heads % cp and not copies)):
        return (
            f"cp = {cp} with cp_method = 'ulysses' gives each process some of the heads, and does not divide the {spec.num_heads} query "
            f"and {spec.num_kv_heads} key/value heads of the model; the latter may also divide it, and are copied then "
            "(cp_method = 'all_gather' or 'ring' needs no heads to divide)"
        )
    return ""


def _pipeline_problem(spec: ModelSpec, pp: int, per_process: int) -> str:
    if pp == 1:
        return ""
    number, parts = pp * per_process, f"pp = {pp}" if per_process == 1 else f"pp = {pp} with pp_stages = {per_process}"
    if spec.tie_embeddings:
        return f"pp = {pp} keeps embedding and head in different processes, and this model of the family {spec.family!r} ties them"
    if number > spec.num_layers:
        return f"{parts} makes {number} parts of the layers, and the model has {spec.num_layers}"
    if spec.indexer is not None:
        for stage in stages(spec, number):
            for layer in range(stage.first, stage.end):
                if spec.indexer.sources[layer] < stage.first:
                    return (
                        f"{parts} cuts the model before layer {stage.first}, and layer {layer} behind it sees the tokens that layer "
                        f"{spec.indexer.sources[layer]} before it chose"
                    )
    return ""
