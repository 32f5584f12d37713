"""`slipstream rl`: open the run folder, start the roles, show what happens, end with the summary."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from slipstream.algorithms.custom import import_function
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.envs.base import count_tasks, load_env
from slipstream.errors import ModelError
from slipstream.launch import run_folder
from slipstream.launch.local import RoleDied, Supervisor
from slipstream.launch.topology import processes
from slipstream.models.spec import ModelSpec
from slipstream.observe.dashboard import Dashboard
from slipstream.observe.report import write_report
from slipstream.observe.summary import print_summary, summarise


def run(config: RunConfig, resume: bool, clean: bool) -> int:
    """Run to the end. Returns the exit code; 1 when a role died (what to do next is printed).

    Raises ConfigError for a mistake that can be seen before anything starts.
    """
    check_inputs(config)
    if clean:
        run_folder.clean(config)
    with run_folder.opened(config, resume) as folder:
        return _supervise(config, folder)


def _supervise(config: RunConfig, folder: Path) -> int:
    console = Console(stderr=True)
    console.print(f"run folder: {folder}")
    dashboard = Dashboard(folder, config.max_steps)
    supervisor = Supervisor(processes(config, folder), folder, lambda line: console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True))
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
        return "Nothing that was trained is lost. Go on with the same command and --resume."
    return "No batch was trained yet. Mend the cause and go on with --resume, or start afresh with --clean."


def check_inputs(config: RunConfig) -> None:
    """Refuse a model, an environment or a custom function that no role could load, before a process says so.

    Raises ModelError, ConfigError, EnvError.
    """
    for env in config.envs:
        loaded = load_env(env, config.seed)
        for split in ("train", "eval"):
            count_tasks(loaded, split)
        if env.advantage.path is not None:
            import_function(env.advantage.path, f"envs[{env.label}].advantage.path")
    if config.trainer.loss.type == "custom":
        import_function(config.trainer.loss.path, "trainer.loss.path")
    spec = ModelSpec.from_folder(config.model.path)
    ChatTokenizer.load(config.model.path)
    if spec.max_positions < config.model.seq_len:
        raise ModelError(
            f"model.seq_len = {config.model.seq_len} and max_position_embeddings = {spec.max_positions} of {config.model.path}: "
            "the model was not made for sequences that long; lower model.seq_len"
        )


def finish(folder: Path) -> None:
    """The table at the end of a run, and where things are."""
    print_summary(summarise(folder))
    print(f"report:       {write_report(folder)}")
    print(f"final model:  {folder / 'final'}")
