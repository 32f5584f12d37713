"""The orchestrator's process: build the real parts of a run folder, run the loop, answer with an exit code.

    0    the run is complete ('max_steps', 'stop_at_eval' or 'max_minutes')
    3    it stopped because there is nothing to learn; the reason is the last line of the log
    143  SIGTERM: what was in flight is dropped and counted; `--resume` goes on at the next step

Everything else is an exception, after the trainer was told. Knows no algorithm: see `loop`.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig, load
from slipstream.envs.base import Env, count_tasks, load_env
from slipstream.envs.frozen import Watchdog, dump_file, play_named
from slipstream.envs.play import EnvPlayer
from slipstream.observe.metrics import MetricsWriter
from slipstream.orchestrator.agents import gateway_for
from slipstream.orchestrator.curriculum import Curriculum
from slipstream.orchestrator.evals import eval_sampling
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.loop import BoundEnv, Orchestrator, Parts
from slipstream.orchestrator.store import FolderLock, RunStore
from slipstream.orchestrator.waits import Deadlines
from slipstream.ports import Engine, Player
from slipstream.serving.gateway.gateway import Gateway
from slipstream.serving.pool import EnginePool
from slipstream.transport.folder import FolderTrainer
from slipstream.types import Outcome, Rollout, Task

COMPLETE, FRUITLESS, TERMINATED = 0, 3, 143


def main(run_folder: Path) -> int:
    """Orchestrate the run in `run_folder` from where its ledger ends. Returns the exit code.

    Raises ConfigError (another orchestrator holds the folder, a wrong environment), TrainerError, EngineError, EnvError, StateError.
    """
    config = load(RunConfig, [run_folder / "config.toml"])
    with (
        closing(FolderLock(run_folder)),
        closing(Ledger(run_folder / "ledger.sqlite")) as ledger,
        MetricsWriter(run_folder, "orchestrator") as metrics,
        closing(Watchdog(dump_file(run_folder), config.orchestrator.max_freeze_s)) as watchdog,
        # not asyncio.run: it waits for every task, and a player that swallows cancellation would keep the process for ever
        closing(asyncio.new_event_loop()) as loop,
    ):
        reason = loop.run_until_complete(_run(run_folder, config, ledger, metrics, watchdog))
        ledger.audit()
    print(f"orchestrator: {reason}", file=sys.stderr, flush=True)
    return {"max_steps": COMPLETE, "stop_at_eval": COMPLETE, "max_minutes": COMPLETE, "stopped": TERMINATED}.get(reason, FRUITLESS)


async def _run(run_folder: Path, config: RunConfig, ledger: Ledger, metrics: MetricsWriter, watchdog: Watchdog) -> str:
    """The reason of the end."""
    for (env, task), rollout in watchdog.seen.items():
        metrics.event("frozen", env=env, task=task, rollout=rollout)
        print(f"orchestrator: WARNING: not played: {_not_played(env, task, rollout)}", file=sys.stderr, flush=True)
    loaded = [load_env(env, config.seed) for env in config.envs]
    async with (
        EnginePool.of_run(run_folder, config.engine.replicas, config.router) as engine,
        gateway_for(loaded, engine, config) as gateway,
    ):
        bound_envs = _bind_envs(config, loaded, engine, gateway, ledger.last_state())
        envs = tuple(_watched(bound, watchdog.seen) for bound in bound_envs)
        written = _Beside(metrics, engine, gateway)
        deadlines = Deadlines.of_run(config.router)
        parts = Parts(envs, engine, FolderTrainer(run_folder), ledger, RunStore(run_folder), written, time.time, deadlines)
        beating = asyncio.create_task(_beat(watchdog, min(1.0, config.orchestrator.max_freeze_s / 4)))
        gc.freeze()  # nothing that is here already will be garbage: a full pass over it would hold the loop up for tens of milliseconds
        run = asyncio.create_task(Orchestrator(config, parts).run(), name="run")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _cancel_once(run))
        try:
            return await run
        except asyncio.CancelledError:
            return "stopped"
        finally:
            beating.cancel()


async def _beat(watchdog: Watchdog, every_s: float) -> None:
    """Tell the watchdog that the loop turns."""
    while True:
        watchdog.arm()
        await asyncio.sleep(every_s)


def _cancel_once(run: asyncio.Task[str]) -> Callable[[], None]:
    """Ask `run` to end. A second signal must not cancel the ending itself: it tells the trainer and writes what was in flight."""

    def cancel() -> None:
        if not run.cancelling():
            run.cancel()

    return cancel


def _bind_envs(
    config: RunConfig, envs: Sequence[Env], engine: Engine, gateway: Gateway | None, state: Mapping[str, Any]
) -> tuple[BoundEnv, ...]:
    """Environments with their players, and their curricula as they were at the last step."""
    tokenizer = ChatTokenizer.load(config.model.path)
    bound = []
    for env_config, env in zip(config.envs, envs, strict=True):
        player = partial(EnvPlayer, env, engine, tokenizer, env_config, config.model.seq_len, gateway=gateway)
        curriculum = _curriculum(config, count_tasks(env, "train"), state.get("curricula", {}).get(env_config.label))
        bound.append(BoundEnv(env_config, env, player(), player(sampling=eval_sampling(env_config, config.eval)), curriculum))
    return tuple(bound)


def _curriculum(config: RunConfig, num_tasks: int, state: Mapping[str, Any] | None) -> Curriculum:
    make: Callable[..., Curriculum] = Curriculum if state is None else partial(Curriculum.from_state, state=state)
    return make(config.orchestrator.curriculum, num_tasks, config.seed)


def _watched(bound: BoundEnv, frozen: Mapping[tuple[str, str], str]) -> BoundEnv:
    return replace(bound, player=_Watched(bound.player, frozen), eval_player=_Watched(bound.eval_player, frozen))


class _Watched:
    """A player whose stack says which rollout it plays, and that does not play what an earlier process froze in."""

    def __init__(self, player: Player, frozen: Mapping[tuple[str, str], str]):
        """`frozen`: (environment, task id) -> rollout id."""
        self._player = player
        self._frozen = frozen

    async def __call__(self, task: Task, rollout_id: str, group_id: str, version_start: int) -> Rollout:
        if (earlier := self._frozen.get((task.env, task.id))) is not None:
            error = _not_played(task.env, task.id, earlier)
            return Rollout(rollout_id, task, group_id, Outcome.env_error, error=error, version_start=version_start, started_s=time.time())
        return await play_named(rollout_id, task, lambda: self._player(task, rollout_id, group_id, version_start))


def _not_played(env: str, task: str, rollout: str) -> str:
    return (
        f"environment {env!r}, task {task}: rollout {rollout} of it was being played when the orchestrator stood still for longer than "
        "orchestrator.max_freeze_s; the stacks are in logs/orchestrator.frozen"
    )


class _Beside:
    """Metrics with the process's memory, and the router's and the gateway's numbers, beside each step's."""

    def __init__(self, metrics: MetricsWriter, pool: EnginePool, gateway: Gateway | None):
        self._metrics = metrics
        self._sources = [pool.metrics, *([] if gateway is None else [gateway.metrics])]
        self._process = psutil.Process()
        self.event = metrics.event

    def log(self, step: int, values: Mapping[str, float]) -> None:
        memory = {"orchestrator/memory/rss_mib": self._process.memory_info().rss / 2**20}
        self._metrics.log(step, {**values, **memory, **{key: value for source in self._sources for key, value in source().items()}})
