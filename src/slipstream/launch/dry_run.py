"""`slipstream rl --dry-run`: every check that a start makes, those that the roles make of the weights among them, and the plan.

What is printed is the resolved run file, with all else in comments. Nothing is started, written or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slipstream.config import RunConfig, to_toml
from slipstream.config.serve import EngineConfig
from slipstream.engine.room import num_blocks
from slipstream.errors import ModelError, SlipstreamError
from slipstream.launch import run_folder
from slipstream.launch.checks import Check, Inputs, check_ports
from slipstream.launch.topology import processes
from slipstream.models.spec import ModelSpec
from slipstream.planner.checks import planned
from slipstream.planner.figures import in_bytes, total


def print_plan(config: RunConfig, resume: bool, clean: bool) -> list[SlipstreamError]:
    """Print what would run and what was checked. Returns everything that speaks against it; [] when nothing does."""
    inputs, found = Inputs(config), list[SlipstreamError]()
    checked = [_line(name, _asked(check, found)) for name, check in _all(inputs, resume, clean)]
    print(to_toml(config))
    for title, lines in (("processes", _processes(config)), ("plan", _plan(inputs)), ("checked", checked)):
        print("\n".join([f"# ---- {title}", *(f"# {line}" for line in lines)]))
    return found


def _all(inputs: Inputs, resume: bool, clean: bool) -> Iterator[Check]:
    config = inputs.config
    yield from inputs.checks()
    try:
        spec = inputs.spec
    except ModelError:
        spec = None  # said already: what is asked of its sizes and weights has to wait
    if spec is not None:
        from slipstream.trainer.rehearse import weight_checks  # torch

        yield from inputs.size_checks()
        yield from weight_checks(config.model.path, config.model.impl, config.trainer)
    yield "run folder", lambda: _check_folder(config, resume, clean)
    yield "ports", lambda: check_ports(config, vars(inputs).get("envs", ()))


def _asked(check: Callable[[], object], found: list[SlipstreamError]) -> str:
    try:
        said = check()
    except SlipstreamError as error:
        found.append(error)
        return "REFUSED, see the error"
    return said if isinstance(said, str) else "ok"


def _check_folder(config: RunConfig, resume: bool, clean: bool) -> str:
    """As a start does, which then makes, empties or takes over the folder."""
    if (config.folder / "config.toml").exists():
        with run_folder.held(config.folder):
            pass
    check = run_folder.check_same if resume else run_folder.check_cleanable if clean else run_folder.check_new
    check(config)
    return f"{config.folder}, {'resumed' if resume else 'emptied first' if clean else 'new'}"


def _processes(config: RunConfig) -> Iterator[str]:
    for spec in processes(config, config.folder):
        place = f" ({spec.group}: rank {spec.env['RANK']} of {spec.env['WORLD_SIZE']})" if spec.group else ""
        yield f"{spec.name}{place}: {' '.join(spec.argv)}"


def _plan(inputs: Inputs) -> Iterator[str]:
    config, engine = inputs.config, inputs.config.engine
    try:
        spec = inputs.spec
    except ModelError:
        return
    parallel = config.trainer.parallel
    yield _line(
        "trainer",
        f"{parallel.processes} processes: dp_replicate {parallel.dp_replicate} x dp_shard {parallel.dp_shard} x cp {parallel.cp} x "
        f"pp {parallel.pp}, ep {parallel.ep}; {config.trainer.dtype}, published as {config.trainer.publish}",
    )
    if config.router.urls:
        yield _line("engines", f"those of router.urls: {', '.join(config.router.urls)}")
    else:
        yield _line("engines", f"{engine.replicas} x {engine.type}, {engine.dtype}; {_roles(config)}")
    if isinstance(engine, EngineConfig) and not config.router.urls:
        yield _line("KV cache", _cache(engine, spec, config.model.seq_len))
    yield _line("memory", _memory(config, spec))


def _roles(config: RunConfig) -> str:
    roles = [config.engine.role(replica) for replica in range(config.engine.replicas)]
    counts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
    return counts + (f"; experts shared by {config.engine.ranks}" if config.engine.ranks > 1 else "")


def _cache(engine: EngineConfig, spec: ModelSpec, seq_len: int) -> str:
    tokens = num_blocks(spec, engine) * engine.block_tokens
    return f"{tokens:,} tokens in blocks of {engine.block_tokens}: {tokens // seq_len} sequences of model.seq_len = {seq_len} a replica"


def _memory(config: RunConfig, spec: ModelSpec) -> str:
    if config.trainer.parallel.pp > 1 or config.trainer.lora is not None:
        return "not planned with pipelines or adapters"
    plan = planned(config, spec)
    return f"{in_bytes(total(plan.node))} of {in_bytes(plan.node_limit)} that may be filled (slipstream explain --verbose)"


def _line(name: str, text: str) -> str:
    return f"{name + ':':<26} {text}"
