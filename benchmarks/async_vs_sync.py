"""What overlap buys: the quickstart's run with `max_off_policy_steps = 0` and with the default, in interleaved pairs.

Model, tasks, batch, group, optimizer, steps and processes are the same. The synchronous run has all it needs to be quick: the engine
takes a whole batch at once, and groups without an advantage are trained instead of replaced, so that no second round of rollouts
delays its batch. What differs is who waits for whom. Neither run evaluates before its last step.

    step_s        seconds from the end of one optimizer step to the end of the next, median over the steps after the first three
    ratio         asynchronous / synchronous, median over pairs
    eval          held-out greedy success of the last policy version
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks._runs import figures, launch, run_config, warm_model
from benchmarks.harness import finish, median, spread
from slipstream.config.base import merge

SETTINGS = {
    "orchestrator": {"filters": [{"type": "zero_advantage", "mode": "monitor"}]},
    "eval": {"interval": 0, "tasks": 256, "skip_first": True},
    "checkpoint": {"interval": 0},
}
KEPT = ("step_s", "step_mean_s", "engine_busy_frac", "trainer_busy_frac", "overlap_frac", "lag_mean", "lag_max", "samples_trained")
COLUMNS = (
    "pair",
    "mode",
    "step_s",
    "step_mean_s",
    "eval",
    "engine_busy_frac",
    "trainer_busy_frac",
    "overlap_frac",
    "lag_mean",
    "load_1min",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sync-threads", type=int, default=1, help="OpenMP threads of engine and trainer where only one of them computes")
    parser.add_argument("--quick", action="store_true", help="one pair of short runs: to see that it works")
    args = parser.parse_args()
    pairs, steps = (1, 6) if args.quick else (args.pairs, args.steps)
    model = warm_model()

    runs = []
    for pair in range(pairs):
        for mode in ("sync", "async") if pair % 2 == 0 else ("async", "sync"):
            changes = merge(SETTINGS, {"max_steps": steps, "seed": pair})
            if mode == "sync":
                threads = {"threads": args.sync_threads}
                changes = merge(changes, {"orchestrator": {"max_off_policy_steps": 0}, "engine": threads, "trainer": threads})
            found = figures(launch(run_config(f"bench-{mode}-{pair}", model, changes)))
            runs.append({"pair": pair, "mode": mode, "eval": found["eval_last"], "load_1min": found["load_1min"], **pick(found, KEPT)})

    by_mode = {mode: [run for run in runs if run["mode"] == mode] for mode in ("sync", "async")}
    ratios, mean_ratios = (pair_ratios(runs, key, pairs) for key in ("step_s", "step_mean_s"))
    headline = {
        "ratio": median(ratios),
        "eval_sync": median([run["eval"] for run in by_mode["sync"]]),
        "eval_async": median([run["eval"] for run in by_mode["async"]]),
        "lag_mean": median([run["lag_mean"] for run in by_mode["async"]]),
        "ratio_of_means": median(mean_ratios),
        "ratio_spread": spread(ratios),
    }
    setting = run_config("bench", model, {**SETTINGS, "max_steps": steps}).model_dump(mode="json") | {"sync_threads": args.sync_threads}
    finish("async_vs_sync", headline, runs, setting, COLUMNS)


def pick(found: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: found[key] for key in keys}


def pair_ratios(runs: list[dict[str, Any]], key: str, pairs: int) -> list[float]:
    """Asynchronous / synchronous, for each pair."""
    value = {(run["pair"], run["mode"]): run[key] for run in runs}
    return [value[pair, "async"] / value[pair, "sync"] for pair in range(pairs)]


if __name__ == "__main__":
    main()
