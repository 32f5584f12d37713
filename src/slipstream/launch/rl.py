"""`slipstream rl`: open the run folder, start the roles, show what happens, end with the summary."""

from __future__ import annotations

import socket
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from slipstream.algorithms.custom import import_function
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.config.serve import EngineConfig
from slipstream.config.vllm import VllmConfig
from slipstream.envs.base import count_tasks, load_env
from slipstream.errors import ConfigError
from slipstream.launch import run_folder
from slipstream.launch.local import RoleDied, Supervisor
from slipstream.launch.ranks import free_port
from slipstream.launch.topology import processes
from slipstream.models.impl import read_spec
from slipstream.observe.dashboard import Dashboard
from slipstream.observe.report import write_report
from slipstream.observe.summary import print_summary, summarise
from slipstream.planner.checks import problems
from slipstream.serving.vllm.support import check_python, untested


def run(config: RunConfig, resume: bool, clean: bool) -> int:
    """Run to the end. Returns the exit code; 1 when a role died (what to do next is printed).

    Raises ConfigError for a mistake that can be seen before anything starts.
    """
    check_inputs(config)
    with run_folder.held(config.folder) as hold:
        check_ports(config)
        if clean:
            run_folder.clean(config)
        folder = run_folder.reopen(config) if resume else run_folder.create(config)
        return _supervise(config, folder, hold)


def _supervise(config: RunConfig, folder: Path, hold: int) -> int:
    console = Console(stderr=True)
    console.print(f"run folder: {folder}")
    dashboard = Dashboard(folder, config.max_steps)
    supervisor = Supervisor(
        processes(config, folder, free_port()), folder, lambda line: console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True), hold
    )
    try:
        supervisor.run(on_poll=dashboard.poll)
    except RoleDied as error:
        dashboard.close()
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        console.print(_advice(folder), highlight=False, soft_wrap=True)
        return 1
    dashboard.close()
    finish(folder)
    return 0


def _advice(folder: Path) -> str:
    """What to do after a role died."""
    if any((folder / "batches").glob("step_*.batch")) or any((folder / "checkpoints").glob("step_*")):
        return "Nothing that was trained is lost. Mend the cause where one is named above, then go on with the same command and --resume."
    return "No batch was trained yet. Mend the cause and start afresh with --clean (or --resume with the same run file)."


def check_inputs(config: RunConfig) -> None:
    """Refuse a model, an environment or a custom function that no role could load, before a process says so.

    Raises ModelError, ConfigError, EnvError.
    """
    check_here(config)
    for env in config.envs:
        loaded = load_env(env, config.seed)
        for split in ("train", "eval"):
            count_tasks(loaded, split)
        if env.advantage.path is not None:
            import_function(env.advantage.path, f"envs[{env.label}].advantage.path")
    if config.trainer.loss.type == "custom":
        import_function(config.trainer.loss.path, "trainer.loss.path")
    if isinstance(config.engine, VllmConfig) and (warning := untested(check_python(config.engine.python).version)) is not None:
        Console(stderr=True).print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)
    spec = read_spec(config.model.path, config.model.impl)
    ChatTokenizer.load(config.model.path)
    for problem in problems(config, spec):
        raise problem


def check_here(config: RunConfig) -> None:
    """Refuse a run of several nodes or of GPUs: this launcher starts processes on the CPUs of one machine. Raises ConfigError."""
    cluster = config.cluster
    if cluster.nodes > 1 or cluster.gpus_per_node or cluster.engines == "elsewhere":
        raise ConfigError(
            f"cluster.nodes = {cluster.nodes}, gpus_per_node = {cluster.gpus_per_node}, engines = {cluster.engines!r}: `slipstream "
            "rl` starts everything on the CPUs of this machine; `slipstream explain` plans such a run. Leave out [cluster] to run here"
        )


def check_ports(config: RunConfig) -> None:
    """Refuse a port that something else listens on, before anything is deleted or started. Raises ConfigError."""
    engine, host = config.engine, config.engine.host
    wanted = {"port": (engine.port, engine.replicas)}
    if isinstance(engine, EngineConfig):
        wanted["disaggregation.port"] = (engine.disaggregation.port, engine.disaggregation.prefill_replicas)
    ports = [(key, port) for key, (first, count) in wanted.items() if first for port in range(first, first + count)]
    for key, port in ports if not config.router.urls else ():
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine does: a port just left is free
                probe.bind(address)
                probe.listen()
        except OSError as error:
            raise ConfigError(
                f"engine.host = {host!r}, engine.{key} = {wanted[key][0]}, engine.replicas = {engine.replicas}: an engine cannot listen on "
                f"port {port}: {error.strerror or error}. Stop what uses it, or set another engine.{key} (0: a free one)"
            ) from None


def finish(folder: Path) -> None:
    """The table at the end of a run, and where things are."""
    print_summary(summarise(folder))
    print(f"report:       {write_report(folder)}")
    print(f"final model:  {folder / 'final'}")
    if (folder / "adapter").exists():
        print(f"adapter:      {folder / 'adapter'}")
