"""The command line: load a run file, call one function.

Every heavy import happens inside the command that needs it, so that `--help`, `summary` and `rollouts` answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from slipstream.config import RunConfig, load
from slipstream.errors import NO_SPACE, ConfigError, ModelError, SlipstreamError
from slipstream.models.folders import check_model_folder

app = typer.Typer(
    help="slipstream: asynchronous reinforcement learning for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Files = Annotated[list[Path], typer.Argument(help="Run files (TOML), later ones win", show_default=False)]
Sets = Annotated[list[str], typer.Option("--set", "-s", help="Override one key: --set trainer.optim.lr=1e-4", show_default=False)]
ImplOption = Annotated[Literal["auto", "hf"], typer.Option("--impl", help="hf: transformers' modules, for other architectures")]
MOST_FILES = 1 << 16
"""Open at one time, where the system permits so many."""
RunFolder = Annotated[Path, typer.Argument(help="Run folder, such as runs/quickstart", show_default=False)]


def main() -> None:
    """Entry point: user errors, and files that cannot be read or written, end without a traceback.

    Exit codes: 0 done, 1 the run failed, 2 mistake in the input, 3 the disk is full (then the log may not say so).
    """
    _allow_open_files()
    try:
        app(standalone_mode=True)
    except (ConfigError, ModelError) as error:
        sys.exit(_complain(error, code=2))
    except SlipstreamError as error:
        sys.exit(_complain(error, code=1))
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(_complain(f"{error.filename}: {error.strerror}", code=NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1))


def _allow_open_files() -> None:
    """As many as this user may have: every request in flight is a connection, and systems begin with 1024, or with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))


def _complain(error: SlipstreamError | str, code: int) -> int:
    with contextlib.suppress(OSError):  # the log may be on the disk that is full
        print(f"error: {error}", file=sys.stderr, flush=True)
    return code


def command(example: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command; its help ends with an example."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        function.__doc__ = f"{function.__doc__}\n\nExample: `{example}`"
        return app.command(**options)(function)

    return register


def role(function: Callable[..., None]) -> Callable[..., None]:
    """A process that a supervisor starts: it ends with its parent, and its title says what it is."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        import setproctitle

        from slipstream.launch.local import die_with_parent

        setproctitle.setproctitle(f"slipstream {function.__name__}")
        die_with_parent()
        function(*args, **kwargs)

    return run


# ---- the main job -------------------------------------------------------------------------------------------------


@command("slipstream rl configs/quickstart.toml --set name=first --set seed=1")
def rl(
    files: Files,
    sets: Sets = [],  # noqa: B006  typer needs the literal default
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this run")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Delete an earlier run of this name first")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Make every check of a start, print the plan, start nothing")] = False,
) -> None:
    """Train a policy: engine, orchestrator and trainer side by side on this machine."""
    from slipstream.launch import dry_run as rehearsal
    from slipstream.launch import run_folder
    from slipstream.launch.rl import run

    config = run_folder.absolute(load(RunConfig, files, sets))
    if resume and clean:
        raise ConfigError("--resume and --clean contradict each other: --clean deletes the run that --resume would continue")
    if not dry_run:
        raise typer.Exit(run(config, resume=resume, clean=clean))
    problems = rehearsal.print_plan(config, resume=resume, clean=clean)
    for problem in problems:
        _complain(problem, code=2)
    raise typer.Exit(2 if problems else 0)


@command("slipstream explain configs/glm5.toml --verbose")
def explain(
    files: Files,
    sets: Sets = [],  # noqa: B006
    mean_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean tokens of a sample, for batch and communication; model.seq_len when left out")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The formula of every figure, and the ranks of every group")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Layout, batch, memory and communication of a run, from its files. Starts nothing; exits with 2 where the run cannot start."""
    from slipstream.jobs.explain import print_plan
    from slipstream.planner.plan import plan

    config = load(RunConfig, files, sets)
    check_model_folder(config.model.path)
    found = plan(config, mean_tokens)
    print(json.dumps(found.as_dict())) if as_json else print_plan(found, verbose)
    for problem in found.problems:
        _complain(problem, code=2)
    if found.problems:
        raise typer.Exit(2)


@command("slipstream sft configs/quickstart.toml --model models/tiny-moe --out models/warm")
def sft(
    files: Files,
    out: Annotated[Path, typer.Option(help="Folder for the resulting model (HF format)", show_default=False)],
    model: Annotated[Path | None, typer.Option(help="Start from this folder instead of model.path", show_default=False)] = None,
    sets: Sets = [],  # noqa: B006
) -> None:
    """Supervised warm-up on the environments' own demonstrations ([sft] in the run file)."""
    from slipstream.jobs.sft import warm_up
    from slipstream.launch import ranks
    from slipstream.launch.local import die_with_parent
    from slipstream.models.impl import read_spec
    from slipstream.parallel.fit import check_fits
    from slipstream.trainer.fit import check_trains

    die_with_parent()
    config = _with_model(load(RunConfig, files, sets), model)
    check_model_folder(config.model.path)
    spec = read_spec(config.model.path, config.model.impl)
    check_fits(config.trainer.parallel, spec)
    check_trains(config.trainer, config.sft.optim if config.sft is not None else config.trainer.optim, spec)
    if ranks.needed(config.trainer.parallel.processes):
        raise typer.Exit(ranks.run(config.trainer.parallel.processes))
    warm_up(config, out)


@command("slipstream eval configs/quickstart.toml --model runs/quickstart/final")
def eval(
    files: Files,
    model: Annotated[Path | None, typer.Option(help="Evaluate this folder instead of model.path", show_default=False)] = None,
    sets: Sets = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Play the held-out tasks of [[envs]] with an engine in this process, and print the scores."""
    from slipstream.jobs.evaluate import evaluate, print_scores

    config = _with_model(load(RunConfig, files, sets), model)
    check_model_folder(config.model.path)
    scores = evaluate(config)
    print(json.dumps(scores)) if as_json else print_scores(scores)
    if not all(row["graded"] for row in scores.values()):
        raise typer.Exit(1)


@command("slipstream doctor configs/quickstart.toml")
def doctor(
    files: Files,
    sets: Sets = [],  # noqa: B006
    processes: Annotated[int, typer.Option(min=1, help="Most trainer processes to start at a time: 1, 2 or 4")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a check")] = False,
) -> None:
    """Check a run file on a two-layer copy of its model: packing, replay, several trainer processes, resume, weight sync, FP8."""
    from dataclasses import asdict

    from rich.console import Console

    from slipstream.doctor.checks import examine, print_rows

    config = load(RunConfig, files, sets)
    check_model_folder(config.model.path)
    rows = examine(config, processes, lambda line: print(f"doctor: {line}", file=sys.stderr, flush=True))
    print("\n".join(json.dumps(asdict(row)) for row in rows)) if as_json else print_rows(rows, Console())
    if any(row.broken for row in rows):
        raise typer.Exit(1)


@command("slipstream make-model models/tiny-moe --preset tiny-moe --env calculator", name="make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(help="Where to write the model (HF format)", show_default=False)],
    preset: Annotated[str, typer.Option(help="Size and architecture: see docs/models.md")] = "tiny-moe",
    env: Annotated[list[str], typer.Option(help="Environments whose demonstrations the tokenizer is trained on")] = ["calculator"],  # noqa: B006
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the corpus")] = 0,
) -> None:
    """Make a small model: random weights and a tokenizer trained here, as an ordinary HF folder."""
    from slipstream.jobs.make_model import make

    print(make(folder, preset, env, seed))


@command('slipstream generate runs/quickstart/final "12+30-7" --env calculator')
def generate(
    model: Annotated[Path, typer.Argument(help="Model folder (HF format)", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="The user's message", show_default=False)],
    env: Annotated[str | None, typer.Option(help="Offer this environment's tools, and run the calls", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per turn")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler")] = 0,
    impl: ImplOption = "auto",
) -> None:
    """Chat once with a model, with an engine in this process."""
    from slipstream.jobs.generate import chat

    check_model_folder(model)
    for message in chat(model, prompt, env, max_tokens=max_tokens, temperature=temperature, seed=seed, impl=impl):
        print(message)


# ---- looking at a run ---------------------------------------------------------------------------------------------


@command("slipstream summary runs/quickstart --json")
def summary(run: RunFolder, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False) -> None:
    """What a run did: steps, evals, lag, outcomes, who was busy, whether the ledger balances."""
    from slipstream.observe.summary import print_summary, summarise

    _check_run(run)
    values = summarise(run)
    print(json.dumps(values)) if as_json else print_summary(values)


@command("slipstream report runs/quickstart")
def report(run: RunFolder) -> None:
    """Write report.html: curves, lag, timeline, expert load, outcomes, transcripts. Works on a running or crashed run."""
    from slipstream.observe.report import write_report

    _check_run(run)
    print(write_report(run))


@command("slipstream rollouts runs/quickstart --newest --outcome completed --max-reward 0 --limit 3")
def rollouts(
    run: RunFolder,
    env: Annotated[str | None, typer.Option(help="Only this environment", show_default=False)] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Only this outcome: completed, truncated, stale, cut, ...", show_default=False)
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Reward at least", show_default=False)] = None,
    max_reward: Annotated[float | None, typer.Option(help="Reward at most", show_default=False)] = None,
    version: Annotated[int | None, typer.Option(help="Started under this policy version", show_default=False)] = None,
    step: Annotated[
        int | None, typer.Option(help="Collected for this step; with --eval: the evaluated version", show_default=False)
    ] = None,
    grep: Annotated[str | None, typer.Option(help="Only transcripts in which this regular expression is found", show_default=False)] = None,
    evals: Annotated[bool, typer.Option("--eval", help="Held-out evaluations instead of training")] = False,
    newest: Annotated[bool, typer.Option("--newest", help="The last step first")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most rollouts to print")] = 5,
) -> None:
    """Read trajectories as text. Every filter that is given must fit."""
    from slipstream.observe.find import find_transcripts, stored

    _check_run(run)
    rewards = {"min_reward": min_reward, "max_reward": max_reward}
    where = {"env": env, "outcome": outcome, "version": version, "step": step, "grep": grep, **rewards}
    transcripts = find_transcripts(run, evals=evals, newest=newest, limit=limit, **where)
    first = next(transcripts, None)
    if first is None:
        print(f"no rollout matches; {stored(run)}", file=sys.stderr)
        return
    for text in (first, *transcripts):
        print(text, end="\n\n")


@command("slipstream drain runs/quickstart engine-1")
def drain(
    run: RunFolder,
    replica: Annotated[str, typer.Argument(help="Name of the replica, such as engine-1", show_default=False)],
    undo: Annotated[bool, typer.Option("--undo", help="Send it requests again")] = False,
) -> None:
    """Send one replica of a running run nothing new, and wait until what runs there has ended. It still gets new weights."""
    from slipstream.jobs.drain import drain as drain_replica

    _check_run(run)
    print(drain_replica(run, replica, undo))


# ---- roles --------------------------------------------------------------------------------------------------------


@command("slipstream engine --model runs/quickstart/final --port 8000")
@role
def engine(
    model: Annotated[Path | None, typer.Option(help="Serve this model folder", show_default=False)] = None,
    run: Annotated[
        Path | None, typer.Option(help="Serve as a replica of this run (started by `slipstream rl`)", show_default=False)
    ] = None,
    replica: Annotated[int, typer.Option(min=0, help="Number of the replica, with --run")] = 0,
    port: Annotated[int, typer.Option(help="Port, with --model; 0 takes a free one")] = 0,
    host: Annotated[str, typer.Option(help="Address to bind, with --model")] = "127.0.0.1",
    seq_len: Annotated[int, typer.Option(help="Context in tokens, with --model")] = 1024,
    impl: ImplOption = "auto",
    ranks: Annotated[int, typer.Option(min=1, help="With --model: so many processes that share the experts, on ports from --port on")] = 1,
    sets: Annotated[list[str], typer.Option("--set", "-s", help="Override an [engine] key: --set max_running=16", show_default=False)] = [],  # noqa: B006
) -> None:
    """Serve a model: OpenAI-compatible and token-in token-out, on this machine."""
    from slipstream.config.serve import EngineConfig

    if (model is None) == (run is None):
        raise ConfigError("engine: give either --model FOLDER (stand-alone) or --run FOLDER (a replica of a run)")
    if run is not None:
        _check_run(run)
        raise typer.Exit(_serve_replica(run, replica))
    from slipstream.engine.fit import check_engine
    from slipstream.engine.server import serve_folder
    from slipstream.launch import ranks as processes
    from slipstream.models.impl import read_spec

    assert model is not None
    check_model_folder(model)
    for key in ("type", "replicas", "ep.ranks", "disaggregation"):
        if any(text.strip().startswith(key) for text in sets):
            raise ConfigError(
                f"engine --model --set {key}: one process of the embedded engine stands alone; --ranks N shares the experts, and "
                "`slipstream rl` starts replicas, prefill engines and vLLM"
            )
    config = load(EngineConfig, (), [f"host={host}", f"port={port}", f"replicas={ranks}", f"ep.ranks={ranks}", *sets])
    if processes.needed(config.ep.ranks):
        check_engine(read_spec(model, impl), config, seq_len, impl)
        raise typer.Exit(processes.run(config.ep.ranks, "engine process"))
    raise typer.Exit(serve_folder(model, config, seq_len, impl))


def _serve_replica(run: Path, replica: int) -> int:
    """By the type of the run's engine: what one needs the other does not import."""
    if load(RunConfig, [run / "config.toml"]).engine.type == "vllm":
        from slipstream.serving.vllm.server import serve_run
    else:
        from slipstream.engine.server import serve_run
    return serve_run(run, replica)


@command("slipstream gateway runs/quickstart --port 8100")
@role
def gateway(
    targets: Annotated[list[str], typer.Argument(help="A run folder, or the URLs of running engines", show_default=False)],
    model: Annotated[Path | None, typer.Option(help="Model folder of the engines, with URLs", show_default=False)] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one")] = 0,
    host: Annotated[str, typer.Option(help="Address to bind")] = "127.0.0.1",
    sets: Annotated[list[str], typer.Option("--set", "-s", help="Override a [gateway] key: --set idle_s=600", show_default=False)] = [],  # noqa: B006
) -> None:
    """One address for agents in front of running engines: OpenAI's and Anthropic's APIs, each session recorded as tokens."""
    from slipstream.config.gateway import GatewayConfig
    from slipstream.serving.gateway.server import serve

    raise typer.Exit(serve(targets, model, load(GatewayConfig, (), [f"host={host}", f"port={port}", *sets])))


@command("slipstream trainer runs/quickstart")
@role
def trainer(run: RunFolder) -> None:
    """The trainer of a run: batches in, policy versions out (started by `slipstream rl`)."""
    from slipstream.trainer.rl import main as trainer_main

    _check_run(run)
    raise typer.Exit(trainer_main(run))


@command("slipstream orchestrator runs/quickstart")
@role
def orchestrator(run: RunFolder) -> None:
    """The orchestrator of a run: rollouts in, batches out (started by `slipstream rl`)."""
    from slipstream.orchestrator.service import main as orchestrator_main

    _check_run(run)
    raise typer.Exit(orchestrator_main(run))


@command("slipstream config trainer.loss")
def config(section: Annotated[str, typer.Argument(help="Dotted section; all when left out")] = "") -> None:
    """Every key of the run file with its default and meaning."""
    from slipstream.config.reference import reference

    print(reference(RunConfig, section))


def _with_model(config: RunConfig, model: Path | None) -> RunConfig:
    return config if model is None else config.replace(model=config.model.replace(path=model))


def _check_run(run: Path) -> None:
    """Raises ConfigError where there is no run. A configuration that this build does not read is said, and hides what needs it."""
    file = run / "config.toml"
    if not file.exists():
        hint = f"; runs there: {', '.join(runs[:5])}" if (runs := _runs_in(run)) else ""
        raise ConfigError(f"{run} is not a run folder: it has no config.toml{hint}")
    try:
        load(RunConfig, [file])
    except ConfigError as error:
        print(f"warning: what needs the configuration is left out, because {file} cannot be used:\n{error}", file=sys.stderr)


def _runs_in(folder: Path) -> list[str]:
    """Runs in this folder or, where it does not exist, beside it."""
    place = folder if folder.is_dir() else folder.parent
    return sorted(str(file.parent) for file in place.glob("*/config.toml")) if place.is_dir() else []


__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
