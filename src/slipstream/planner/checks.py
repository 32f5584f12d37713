"""Everything about a run that can be refused before it starts, from its run file and config.json alone.

A check raises; each error names the keys, their values, the reason and what would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slipstream.config.run import RunConfig
from slipstream.config.serve import EngineConfig
from slipstream.engine.fit import check_positions, engine_checks
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models.spec import ModelSpec
from slipstream.parallel.fit import check_fits, misfit
from slipstream.planner.batch import Arithmetic
from slipstream.planner.figures import in_bytes, total
from slipstream.planner.layout import Layout
from slipstream.planner.levers import levers
from slipstream.planner.memory import Memory, memory
from slipstream.trainer.fit import check_trains


def problems(config: RunConfig, spec: ModelSpec) -> list[SlipstreamError]:
    """All that speaks against the run; [] when nothing does."""
    found = []
    for _, check in checks(config, spec):
        try:
            check()
        except SlipstreamError as error:
            found.append(error)
    return found


def checks(config: RunConfig, spec: ModelSpec) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is looked at, and a call that raises."""
    yield "length of sequences", lambda: check_positions(spec, config.model.seq_len)
    yield "layout of the trainer", lambda: check_fits(config.trainer.parallel, spec)
    yield "settings of the trainer", lambda: check_trains(config.trainer, config.trainer.optim, spec)
    yield "shares of a batch", lambda: check_share(config, spec)
    if config.cluster.engines == "beside" and isinstance(engine := config.engine, EngineConfig):
        yield from engine_checks(spec, engine, config.model.seq_len, config.model.impl)
    if config.trainer.parallel.pp == 1 and config.trainer.lora is None:  # what the plan of memory does not know
        yield "memory", lambda: check_memory(config, spec)


def check_share(config: RunConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: processes that could never get a row, or a token of one. A row is cut between samples only."""
    parallel, batch = config.trainer.parallel, config.orchestrator.batch
    if batch.type == "samples" and batch.samples < parallel.data:
        nearest = parallel.nearest(
            lambda cp, ep, pp: parallel.processes // (cp * pp) <= batch.samples and not misfit(parallel, spec, cp, ep, pp)
        )
        raise ConfigError(
            f"orchestrator.batch.samples = {batch.samples} and dp_replicate x dp_shard = {parallel.dp_replicate} x {parallel.dp_shard} = "
            f"{parallel.data}: a batch has fewer samples than there are data ranks, and some of them would never train. The nearest "
            f"that fits: samples = {parallel.data}, or {nearest}"
        )
    if parallel.cp > config.trainer.row_tokens:
        raise ConfigError(
            f"trainer.parallel.cp = {parallel.cp} and trainer.row_tokens = {config.trainer.row_tokens}: fewer tokens than processes "
            f"that share them. The nearest that fits: cp = {config.trainer.row_tokens}"
        )


def check_memory(config: RunConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: the plan does not fit into the memory of the machines; says what would make it."""
    plan = planned(config, spec)
    if plan.excess <= 0:
        return
    fixes = [text for text, changed in levers(config, spec) if planned(changed, spec).excess <= 0]
    advice = f"What would fit: {'; or '.join(fixes)}" if fixes else f"No single change fits; {_most(config, spec)}"
    raise ConfigError(f"{_shortage(config, plan)}. {advice}")


def planned(config: RunConfig, spec: ModelSpec) -> Memory:
    layout = Layout.of(config, spec)
    return memory(config, spec, layout, Arithmetic.of(config, layout))


def _shortage(config: RunConfig, plan: Memory) -> str:
    cluster = config.cluster
    on_gpu = plan.process_limit is not None and total(plan.process) > plan.process_limit
    figures, limit = (plan.process, plan.process_limit or 0.0) if on_gpu else (plan.node, plan.node_limit)
    place = f"GPU (cluster.gpu_memory_gb = {cluster.gpu_memory_gb:g})" if on_gpu else "node"
    largest = ", ".join(f"{figure.name} {figure.text}" for figure in sorted(figures, key=lambda f: -f.value)[:4])
    return (
        f"memory: {in_bytes(total(figures))} are needed on each {place}, and {in_bytes(limit)} may be filled "
        f"(cluster.usable_frac = {cluster.usable_frac:g}); the largest parts: {largest}"
    )


def _most(config: RunConfig, spec: ModelSpec) -> str:
    """Of changes one after the other, each time the one that saves most, without more nodes where that helps: what is missing after at
    most three of them."""
    done: list[str] = []
    excess = planned(config, spec).excess
    while excess > 0 and len(done) < 3:
        tried = [(planned(changed, spec).excess, text, changed) for text, changed in levers(config, spec)]
        best = min(tried, key=lambda entry: (entry[2].cluster.nodes, entry[0]), default=None)
        if best is None or best[0] >= excess:
            break
        excess, text, config = best
        done.append(text)
    together = ", then ".join(done) or "nothing here helps"
    return (
        f"{together}: fits" if excess <= 0 else f"after {together}, {in_bytes(excess)} are still missing: more processes or a smaller model"
    )
