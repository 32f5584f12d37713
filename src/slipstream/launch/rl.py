"""`slipstream rl`: open the run folder, start the roles, show what happens, end with the summary."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from slipstream.config import RunConfig
from slipstream.launch import run_folder
from slipstream.launch.checks import check_inputs, check_ports
from slipstream.launch.local import RoleDied, Supervisor
from slipstream.launch.ranks import free_port
from slipstream.launch.topology import processes
from slipstream.observe.dashboard import Dashboard
from slipstream.observe.report import write_report
from slipstream.observe.summary import print_summary, summarise


def run(config: RunConfig, resume: bool, clean: bool) -> int:
    """Run to the end. Returns the exit code; 1 when a role died (what to do next is printed).

    Raises ConfigError, ModelError or EnvError for a mistake that can be seen before anything starts.
    """
    envs = check_inputs(config)
    with run_folder.held(config.folder) as hold:
        check_ports(config, envs)
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


def finish(folder: Path) -> None:
    """The table at the end of a run, and where things are."""
    print_summary(summarise(folder))
    print(f"report:       {write_report(folder)}")
    print(f"final model:  {folder / 'final'}")
    if (folder / "adapter").exists():
        print(f"adapter:      {folder / 'adapter'}")
