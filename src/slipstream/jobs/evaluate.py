"""`slipstream eval`: held-out scores of a model folder, with an engine in this process.

The same evaluation as a run's own (`slipstream.orchestrator.evals`), of one folder instead of a live version.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.local import local_engine
from slipstream.envs.base import load_env
from slipstream.envs.play import EnvPlayer
from slipstream.errors import ConfigError
from slipstream.orchestrator.agents import gateway_for
from slipstream.orchestrator.evals import EvalResult, Evaluator, eval_sampling
from slipstream.types import Rollout

VERSION = 0


def evaluate(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Scores by environment, as `_row` lists them.

    Raises ConfigError (eval.tasks is 0), ModelError, EnvError (an environment without tasks).
    """
    import torch

    if config.eval.tasks == 0:
        raise ConfigError("eval.tasks = 0 turns evaluation off: nothing to play. Set eval.tasks to at least 1")
    torch.set_num_threads(config.engine.threads)
    return asyncio.run(_evaluate(config))


async def _evaluate(config: RunConfig) -> dict[str, dict[str, Any]]:
    tokenizer = ChatTokenizer.load(config.model.path)
    engine = EmbeddedEngine(
        config.model.path, config.engine, config.model.seq_len, seed=config.seed, version=VERSION, impl=config.model.impl
    )
    loaded = [load_env(env, config.seed) for env in config.envs]
    async with local_engine(engine) as port, gateway_for(loaded, port, tokenizer, config) as gateway:
        players = [
            EnvPlayer(env, port, tokenizer, section, config.model.seq_len, eval_sampling(section, config.eval), gateway)
            for env, section in zip(loaded, config.envs, strict=True)
        ]
        envs = list(zip(config.envs, loaded, players, strict=True))
        # one try: there is no other process that could come back, and a deadline that was missed once would be missed again
        evaluator = Evaluator(envs, config.eval, lambda: config.engine.max_running, time.time, tries=1)
        results, rollouts = await evaluator.play_all(VERSION)
    return {label: _row(config, result, [r for r in rollouts if r.task.env == label]) for label, result in results.items()}


def _row(config: RunConfig, result: EvalResult, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """One environment. The averages are None where nothing was graded; `errors`: an example for each outcome without a grade."""
    graded = result.as_dict()
    averages = {name: graded[name] if result.samples else None for name in ("avg_at_k", "pass_at_k", "reward_mean")}
    return {
        "tasks": len({rollout.task.id for rollout in rollouts}),
        "k": config.eval.samples,
        **averages,
        "graded": result.samples,
        "ungraded": result.ungraded,
        "outcomes": dict(Counter(rollout.outcome.value for rollout in rollouts)),
        "errors": {r.outcome.value: r.error or "past its deadline (rollout_timeout_s)" for r in rollouts if not r.outcome.gradable},
    }


def print_scores(scores: dict[str, dict[str, Any]], console: Console | None = None) -> None:
    """A row an environment, and below the table why rollouts have no grade, where some have none."""
    console = console or Console()
    k = next(iter(scores.values()))["k"]
    table = Table(title="held-out tasks")
    for name in ("environment", "tasks", f"avg@{k}", f"pass@{k}", "reward", "outcomes"):
        table.add_column(name, justify="left" if name in ("environment", "outcomes") else "right")
    for label, row in scores.items():
        averages = ["-" if row[name] is None else f"{row[name]:.3f}" for name in ("avg_at_k", "pass_at_k", "reward_mean")]
        table.add_row(label, str(row["tasks"]), *averages, ", ".join(f"{name} {count}" for name, count in sorted(row["outcomes"].items())))
    console.print(table)
    for label, row in scores.items():
        for outcome, error in row["errors"].items():
            line = f"{label}: {row['outcomes'][outcome]} {outcome}, in no average. One of them: {error}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
