"""Single changes that save memory, as a user would write them, each with the run that they make of this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.config.run import RunConfig
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec
from slipstream.parallel.fit import check_fits

Lever = tuple[str, RunConfig]
"""(what to write, the run then)"""


def levers(config: RunConfig, spec: ModelSpec) -> Iterator[Lever]:
    """Only changes that the run file and the model allow. Cheapest first: those that cost no time before those that do."""
    trainer, parallel = config.trainer, config.trainer.parallel
    if trainer.optim.moments == "float32":
        yield from _changed(config, spec, "trainer.optim.moments = 'bfloat16'", optim={**trainer.optim.model_dump(), "moments": "bfloat16"})
    if trainer.recompute != "layer":
        yield from _changed(config, spec, 'trainer.recompute = "layer"', recompute="layer")
    if trainer.row_tokens > config.model.seq_len:
        smaller = max(config.model.seq_len, trainer.row_tokens // 2)
        yield from _changed(config, spec, f"trainer.row_tokens = {smaller}", row_tokens=smaller)
    for key in ("moments", "activations"):
        if not getattr(trainer.offload, key):
            moved = {**trainer.offload.model_dump(), key: True}
            yield from _changed(config, spec, f"trainer.offload.{key} = true", offload=moved)
    for key in ("ep", "cp"):
        value = 2 * getattr(parallel, key)
        yield from _changed(config, spec, f"trainer.parallel.{key} = {value}", parallel={**parallel.model_dump(), key: value})
    if config.cluster.gpus_per_node:
        more = {**parallel.model_dump(), "processes": 2 * parallel.processes}
        nodes = config.cluster.model_dump() | {"nodes": 2 * config.cluster.nodes}
        text = f"trainer.parallel.processes = {2 * parallel.processes} on cluster.nodes = {nodes['nodes']}"
        yield from _changed(config, spec, text, cluster=nodes, parallel=more)


def _changed(config: RunConfig, spec: ModelSpec, text: str, cluster: dict[str, Any] | None = None, **trainer: Any) -> Iterator[Lever]:
    """Nothing where the change makes a run that is refused for another reason."""
    whole = config.model_dump()
    whole["trainer"] |= trainer
    whole["cluster"] = cluster or whole["cluster"]
    try:
        changed = config.replace(**whole)
        check_fits(changed.trainer.parallel, spec)
    except ConfigError:
        return
    yield text, changed
