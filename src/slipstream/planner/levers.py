"""Single changes that save memory, as a user would write them, each with the run that they make of this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slipstream.config.run import RunConfig
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec
from slipstream.parallel.fit import check_fits
from slipstream.planner.offload import ACTIVATIONS, OPTIMIZER, Offload

Lever = tuple[str, RunConfig, Offload]
"""(what to write, the run then, what is then on the host)"""


def levers(config: RunConfig, spec: ModelSpec, offload: Offload) -> Iterator[Lever]:
    """Only changes that the run file and the model allow. Cheapest first: those that cost no time before those that do."""
    trainer, parallel = config.trainer, config.trainer.parallel
    if trainer.optim.moments == "float32":
        yield from _changed(
            config, spec, offload, "trainer.optim.moments = 'bfloat16'", optim={**trainer.optim.model_dump(), "moments": "bfloat16"}
        )
    if not trainer.recompute:
        yield from _changed(config, spec, offload, "trainer.recompute = true", recompute=True)
    if trainer.row_tokens > config.model.seq_len:
        smaller = max(config.model.seq_len, trainer.row_tokens // 2)
        yield from _changed(config, spec, offload, f"trainer.row_tokens = {smaller}", row_tokens=smaller)
    if config.cluster.gpus_per_node:
        if not offload.optimizer:
            yield OPTIMIZER, config, replace(offload, optimizer=True)
        if not offload.activations:
            yield ACTIVATIONS, config, replace(offload, activations=True)
    for key in ("ep", "cp"):
        value = 2 * getattr(parallel, key)
        yield from _changed(config, spec, offload, f"trainer.parallel.{key} = {value}", parallel={**parallel.model_dump(), key: value})
    if config.cluster.gpus_per_node:
        more = {**parallel.model_dump(), "processes": 2 * parallel.processes}
        nodes = config.cluster.model_dump() | {"nodes": 2 * config.cluster.nodes}
        text = f"trainer.parallel.processes = {2 * parallel.processes} on cluster.nodes = {nodes['nodes']}"
        yield from _changed(config, spec, offload, text, cluster=nodes, parallel=more)


def _changed(
    config: RunConfig, spec: ModelSpec, offload: Offload, text: str, cluster: dict[str, Any] | None = None, **trainer: Any
) -> Iterator[Lever]:
    """Nothing where the change makes a run that is refused for another reason."""
    whole = config.model_dump()
    whole["trainer"] |= trainer
    whole["cluster"] = cluster or whole["cluster"]
    try:
        changed = config.replace(**whole)
        check_fits(changed.trainer.parallel, spec)
    except ConfigError:
        return
    yield text, changed, offload
