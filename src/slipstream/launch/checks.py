"""What is asked of a run before anything of it starts: `slipstream rl` stops at the first answer that is wrong, its dry run asks on.

Each check is where its subject is; this is the order, and what they share. What needs the run folder to itself is asked later: ports.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from rich.console import Console
from rich.markup import escape

from slipstream.algorithms.custom import import_function
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.config.serve import EngineConfig
from slipstream.config.vllm import VllmConfig
from slipstream.engine.tiers.fit import check_folders
from slipstream.envs.agent import AgentEnv
from slipstream.envs.base import Env, count_tasks, load_env
from slipstream.errors import ConfigError
from slipstream.models.folders import check_model_folder
from slipstream.models.impl import read_spec
from slipstream.models.spec import ModelSpec
from slipstream.planner.checks import checks
from slipstream.serving.members import source_of
from slipstream.serving.vllm.support import check_python, untested

Check = tuple[str, Callable[[], object]]
"""What is looked at, and a call that raises SlipstreamError; what it returns, if that is a string, says what was found."""


class Inputs:
    """What a run is made from. Looked at once."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @cached_property
    def spec(self) -> ModelSpec:
        """Raises ModelError."""
        model = self.config.model
        check_model_folder(model.path)
        return read_spec(model.path, model.impl)

    @cached_property
    def envs(self) -> list[Env]:
        """Raises ConfigError, EnvError."""
        return [load_env(env, self.config.seed) for env in self.config.envs]

    def checks(self) -> Iterator[Check]:
        """Those that need no model, then those that need its sizes."""
        config, engine = self.config, self.config.engine
        yield "machine", lambda: check_here(config)
        yield "environments", self._environments
        yield "functions of your own", lambda: _check_functions(config)
        if config.router.urls:
            yield "engines that run already", lambda: source_of(config.router, config.folder, engine.replicas) and None
        elif isinstance(engine, VllmConfig):
            yield "vLLM", lambda: _check_vllm(engine)
        elif isinstance(engine, EngineConfig):
            yield "folders of the KV tiers", lambda: check_folders(engine.tiers)
        yield "model", self._model
        yield "tokenizer", self._tokenizer

    def size_checks(self) -> Iterator[Check]:
        """Raises ModelError where there is no model to ask about."""
        yield from checks(self.config, self.spec)

    def _environments(self) -> str:
        return "; ".join(f"{env.name}: {count_tasks(env, 'train')} tasks, {count_tasks(env, 'eval')} held out" for env in self.envs)

    def _model(self) -> str:
        spec = self.spec
        experts = f"; {spec.num_experts} experts in {len(spec.moe_layers)} of {spec.num_layers} layers" if spec.moe_layers else ""
        return f"{spec.family}, {spec.num_params:,} parameters{experts}"

    def _tokenizer(self) -> str:
        return f"{ChatTokenizer.load(self.config.model.path).vocab_size:,} tokens"


def check_inputs(config: RunConfig) -> list[Env]:
    """Refuse what no role could use, before a process says so. Returns the environments.

    Raises ModelError, ConfigError, EnvError.
    """
    inputs = Inputs(config)
    for _, check in inputs.checks():
        check()
    for _, check in inputs.size_checks():
        check()
    return inputs.envs


def check_here(config: RunConfig) -> None:
    """Refuse a run of several nodes or of GPUs: this launcher starts processes on the CPUs of one machine. Raises ConfigError."""
    cluster = config.cluster
    if cluster.nodes > 1 or cluster.gpus_per_node or cluster.engines == "elsewhere":
        raise ConfigError(
            f"cluster.nodes = {cluster.nodes}, gpus_per_node = {cluster.gpus_per_node}, engines = {cluster.engines!r}: `slipstream "
            "rl` starts everything on the CPUs of this machine; `slipstream explain` plans such a run. Leave out [cluster] to run here"
        )


def check_ports(config: RunConfig, envs: Sequence[Env] = ()) -> None:
    """Refuse an address where nothing can listen, or a port that something else listens on. Raises ConfigError."""
    engine = config.engine
    if not config.router.urls:
        wanted = {"port": (engine.port, engine.replicas)}
        if isinstance(engine, EngineConfig):
            wanted["disaggregation.port"] = (engine.disaggregation.port, engine.disaggregation.prefill_replicas)
        for key, (first, count) in wanted.items():
            for port in range(first, first + count) if first else [0] * min(count, 1):
                keys = f"engine.host = {engine.host!r}, engine.{key} = {first}, engine.replicas = {engine.replicas}: an engine"
                _check_port(engine.host, port, keys, f"engine.{key}")
    if any(isinstance(env, AgentEnv) for env in envs):
        gateway = config.gateway
        keys = f"gateway.host = {gateway.host!r}, gateway.port = {gateway.port}: the gateway"
        _check_port(gateway.host, gateway.port, keys, "gateway.port")


def _check_port(host: str, port: int, who: str, key: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: a port just left is free
            probe.bind(address)
            probe.listen()
    except OSError as error:
        advice = (
            f"Stop what uses it, or set another {key} (0: a free one)" if port else f"Set {key.partition('.')[0]}.host to an address here"
        )
        raise ConfigError(f"{who} cannot listen on port {port}: {error.strerror or error}. {advice}") from None


def _check_functions(config: RunConfig) -> None:
    for env in config.envs:
        if env.advantage.path is not None:
            import_function(env.advantage.path, f"envs[{env.label}].advantage.path")
    if config.trainer.loss.type == "custom":
        import_function(config.trainer.loss.path, "trainer.loss.path")


def _check_vllm(engine: VllmConfig) -> str:
    """A version that was not tried is said, not refused."""
    found = check_python(engine.python)
    if (warning := untested(found.version)) is not None:
        Console(stderr=True).print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)
    return f"{found.version}{' for CPUs' if found.cpu else ''} in {engine.python}"
