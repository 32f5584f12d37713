"""`slipstream eval`: held-out scores of a model folder, with an engine in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.config.envs import EnvConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.local import local_engine
from slipstream.envs.base import count_tasks, load_env
from slipstream.envs.play import EnvPlayer
from slipstream.ports import Engine
from slipstream.types import Outcome, Rollout


def evaluate(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Scores by environment: tasks, samples, success (share of rollouts at or above success_reward), reward_mean, outcomes."""
    import torch

    torch.set_num_threads(config.engine.threads)
    return asyncio.run(_evaluate(config))


async def _evaluate(config: RunConfig) -> dict[str, dict[str, Any]]:
    tokenizer = ChatTokenizer.load(config.model.path)
    engine = EmbeddedEngine(config.model.path, config.engine, config.model.seq_len, seed=config.seed, version=0)
    async with local_engine(engine) as port:
        return {env.label: await _scores(config, env, port, tokenizer) for env in config.envs}


async def _scores(config: RunConfig, env_config: EnvConfig, engine: Engine, tokenizer: ChatTokenizer) -> dict[str, Any]:
    env = load_env(env_config, config.seed)
    sampling = env_config.sampling.replace(temperature=config.eval.temperature)
    player = EnvPlayer(env, engine, tokenizer, env_config, config.model.seq_len, sampling=sampling)
    room = asyncio.Semaphore(config.engine.max_running)

    async def one(index: int, k: int) -> Rollout:
        task, id = env.task("eval", index), f"eval-{index}-{k}"
        async with room:
            try:
                async with asyncio.timeout(env_config.rollout_timeout_s):
                    return await player(task, id, task.id, 0)
            except TimeoutError:
                return Rollout(id, task, task.id, Outcome.cut)

    tasks = min(config.eval.tasks, count_tasks(env, "eval"))
    rollouts = await asyncio.gather(*(one(i, k) for i in range(tasks) for k in range(config.eval.samples)))
    rewards = np.array([r.reward if r.reward is not None else np.nan for r in rollouts])
    outcomes: dict[str, int] = {}
    for rollout in rollouts:
        outcomes[rollout.outcome.value] = outcomes.get(rollout.outcome.value, 0) + 1
    graded = rewards[~np.isnan(rewards)]
    return {
        "tasks": tasks,
        "samples": config.eval.samples,
        "success": float((graded >= config.eval.success_reward).mean()) if len(graded) else None,
        "reward_mean": float(graded.mean()) if len(graded) else None,
        "outcomes": outcomes,
    }


def print_scores(scores: dict[str, dict[str, Any]]) -> None:
    table = Table("environment", "tasks", "samples", "success", "reward", "outcomes")
    for name, row in scores.items():
        outcomes = ", ".join(f"{key} {count}" for key, count in row["outcomes"].items())
        numbers = ["-" if row[key] is None else f"{row[key]:.3f}" for key in ("success", "reward_mean")]
        table.add_row(name, str(row["tasks"]), str(row["samples"]), *numbers, outcomes)
    Console().print(table)
