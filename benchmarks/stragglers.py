"""What stragglers cost: 5% of rollouts take 20 times as long and 2% never return, against the same run without them.

The environment is the calculator with a tool that stalls after the policy's first turn, by a seeded draw for each rollout. Both runs
have the same settings, as one would choose them who knows that stragglers exist: a group closes with three quarters of its rollouts,
a median duration after the last of these came in; a rollout may take three times as long as a slow one. A short run without
stragglers, before the pairs, finds the median duration. The learning rate is next to nothing, so that both runs sample from the same
policy to the end and lose the same share of groups to equal rewards.

    samples_per_s       samples trained by seconds, over the steps after the first three
    cut, stale          ended because their group closed without them or their deadline passed; because they became too old to train
    wait_slots_s        seconds of a step during which no group could start for want of a free slot
    drained             still in flight when the last batch was complete (their outcome is 'cut' as well)
    throughput_ratio    with stragglers / without, median over interleaved pairs
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._runs import figures, launch, run_config, warm_model
from benchmarks.harness import finish, median
from slipstream.config import RunConfig
from slipstream.config.base import merge
from slipstream.envs.base import Played
from slipstream.envs.calculator import Calculator
from slipstream.observe.history import History
from slipstream.observe.rollouts import read_rollouts
from slipstream.ports import Policy
from slipstream.types import Task

SLOW_FRAC, SLOWER, HUNG_FRAC = 0.05, 20.0, 0.02
QUORUM = 0.75
CALIBRATION_STEPS = 6
COLUMNS = (
    *("pair", "stragglers", "samples_per_s", "step_mean_s", "engine_busy_frac", "trainer_busy_frac", "wait_slots_s"),
    *("completed", "cut", "stale", "drained", "balanced", "load_1min"),
)


class SlowCalculator(Calculator):
    """The calculator whose tool stalls: for `slow_s` in a share of the rollouts, for ever in another share."""

    def __init__(self, seed: int = 0, slow_frac: float = 0.0, hung_frac: float = 0.0, slow_s: float = 0.0, **calculator: Any):
        super().__init__(seed, **calculator)
        self._shares, self._slow_s = (slow_frac, hung_frac), slow_s
        self._rng = np.random.default_rng(seed)

    async def play(self, task: Task, policy: Policy) -> Played:
        """One draw for each rollout, so rollouts of one group differ."""
        draw, (slow_frac, hung_frac) = self._rng.random(), self._shares
        if draw < hung_frac:
            return await super().play(task, Stalling(policy, None))
        if draw < hung_frac + slow_frac:
            return await super().play(task, Stalling(policy, self._slow_s))
        return await super().play(task, policy)


class Stalling:
    """A policy after whose first reply nothing happens for a while."""

    def __init__(self, policy: Policy, seconds: float | None):
        """`seconds`: None is for ever."""
        self._policy, self._seconds, self._stalled = policy, seconds, False

    async def reply(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> dict:
        message = await self._policy.reply(messages, tools)
        if not self._stalled:
            self._stalled = True
            await (asyncio.sleep(self._seconds) if self._seconds is not None else asyncio.Event().wait())
        return message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="one pair of short runs: to see that it works")
    args = parser.parse_args()
    pairs, steps = (1, 8) if args.quick else (args.pairs, args.steps)
    model = warm_model()

    median_s = median_duration(launch(configure("bench-calibration", model, CALIBRATION_STEPS, 0, None, stragglers=False)))
    runs = []
    for pair in range(pairs):
        for stragglers in (False, True) if pair % 2 == 0 else (True, False):
            name = f"bench-{'stragglers' if stragglers else 'clean'}-{pair}"
            runs.append({"pair": pair, **measure(launch(configure(name, model, steps, pair, median_s, stragglers)), stragglers)})

    rates = {(run["pair"], run["stragglers"]): run["samples_per_s"] for run in runs}
    disturbed = [run for run in runs if run["stragglers"]]
    outcomes = sum((Counter(run["rollouts_by_outcome"]) for run in disturbed), Counter())
    headline = {
        "throughput_ratio": median([rates[pair, True] / rates[pair, False] for pair in range(pairs)]),
        "rollouts_by_outcome": dict(outcomes),
        "ledger_balanced": all(run["balanced"] for run in runs),
    }
    setting = configure("bench", model, steps, 0, median_s, stragglers=True).model_dump(mode="json")
    notes = f"median rollout: {median_s:.2f} s; slow: {SLOWER * median_s:.1f} s; outcomes are of the runs with stragglers together"
    finish("stragglers", headline, runs, setting, COLUMNS, notes)


def configure(name: str, model: Path, steps: int, seed: int, median_s: float | None, stragglers: bool) -> RunConfig:
    """The quickstart's run with an environment that may stall, and deadlines by the median duration where that is known."""
    changes: dict[str, Any] = {
        "max_steps": steps,
        "seed": seed,
        "trainer": {"optim": {"lr": 1e-9}},
        "eval": {"tasks": 0},
        "checkpoint": {"interval": 0},
    }
    config = run_config(name, model, changes)
    env: dict[str, Any] = {"id": "benchmarks.stragglers:SlowCalculator", "name": "calculator"}
    if median_s is not None:
        env["rollout_timeout_s"] = 3 * SLOWER * median_s
        changes["orchestrator"] = {"group_quorum": QUORUM, "group_grace_s": median_s}
    if stragglers and median_s is not None:
        env["args"] = {"slow_frac": SLOW_FRAC, "hung_frac": HUNG_FRAC, "slow_s": (SLOWER - 1) * median_s}
    changes["envs"] = [merge(config.envs[0].model_dump(mode="json"), env)]
    return run_config(name, model, changes)


def median_duration(run_folder: Path) -> float:
    """Seconds that a rollout took, median over those that ended by themselves."""
    return statistics.median(record["duration_s"] for record in read_rollouts(run_folder, outcome="completed"))


def measure(run_folder: Path, stragglers: bool) -> dict[str, Any]:
    found = figures(run_folder)
    history = History(run_folder)
    history.poll()
    outcomes, reasons = found["rollouts_by_outcome"], found["dropped_by_reason"]
    gradable = outcomes.get("completed", 0) + outcomes.get("truncated", 0)
    return {
        "stragglers": stragglers,
        "samples_per_s": found["samples_per_s"],
        "rollouts_per_s": gradable / found["window_s"],
        "step_mean_s": found["step_mean_s"],
        "wait_slots_s": float(np.mean(history.series("orchestrator/time/wait_slots_s")[1])),
        "rollouts_by_outcome": outcomes,
        "dropped_by_reason": reasons,
        "completed": outcomes.get("completed", 0),
        "cut": reasons.get("cut", 0),
        "stale": outcomes.get("stale", 0),
        "drained": reasons.get("drained", 0),
        "balanced": found["ledger_balanced"] and sum(outcomes.values()) == found["rollouts_issued"],
        "engine_busy_frac": found["engine_busy_frac"],
        "trainer_busy_frac": found["trainer_busy_frac"],
        "load_1min": found["load_1min"],
    }


if __name__ == "__main__":
    main()
