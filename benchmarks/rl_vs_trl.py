"""The same RL job by slipstream and by TRL's GRPOTrainer: trained samples per second, and time to the same held-out success.

Both start from the same warmed-up mixture of experts (0.9M parameters) and train on the same task (`benchmarks._json_task`, one turn)
with the same prompts, batch, group size, longest answer, temperature, AdamW and reward; every group is trained, whatever its rewards;
advantages are the reward minus the group's mean, the loss is the mean over the batch's tokens. slipstream runs its three processes with
one thread each. TRL (in benchmarks/.venv-trl, made on first use) generates with transformers in the process that trains; it gets the best
of one or two threads and of two implementations of the experts, found by short pilot runs.

    samples_per_s   trained samples by seconds, from the end of the third step on
    time_s          from the start of training (models loaded) to the first snapshot with the target success: greedy, on held-out tasks,
                    scored afterwards by slipstream's engine for both. Evaluation and TRL's saving of snapshots do not count.

slipstream evaluates nothing during its run; its snapshots are the policy versions that it publishes anyway.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._runs import ROOT, run_config
from benchmarks._venvs import trl_python
from benchmarks._vs_trl import run_slipstream, run_trl, trl_pilots
from benchmarks.harness import finish, median
from slipstream.chat.template import plain_messages, render
from slipstream.config import RunConfig
from slipstream.envs.base import load_env
from slipstream.jobs.evaluate import evaluate
from slipstream.jobs.sft import warm_up
from slipstream.models.maker import CHAT_TEMPLATE, make_model
from slipstream.transport.weights import TENSORS_FILE

ENV = {
    "id": "benchmarks._json_task:JsonChain",
    "name": "json-chain",
    "group_size": 8,
    "max_turns": 1,
    "sampling": {"temperature": 1.0, "max_tokens": 128},
}
SETTINGS = {
    "envs": [ENV],
    "model": {"seq_len": 192},
    "trainer": {"optim": {"lr": 5e-4, "warmup_steps": 3, "schedule": "constant"}},
    "orchestrator": {"batch": {"type": "samples", "samples": 128}, "filters": []},
    "eval": {"tasks": 0},
    "checkpoint": {"interval": 0},
    "sft": {"steps": 500, "noise": 0.55, "samples_per_step": 64, "log_every": 100, "optim": {"lr": 5e-3}},
}
MODEL = ROOT / "models" / "bench-json-chain"
COLUMNS = ("system", "seed", "samples_per_s", "step_s", "time_s", "steps_to_target", "success_first", "success_last", "load_1min")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--snapshot-every", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.85, help="held-out success to reach; the warmed-up model has about 0.3")
    parser.add_argument("--eval-tasks", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="8 steps, no pilots, a target of 0.6: to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.snapshot_every, args.target, args.eval_tasks = 8, 2, 0.6, 128
    python, warm = trl_python(), warm_model()
    with tempfile.TemporaryDirectory() as scratch:
        first = run_config("bench-vs-trl", warm, {**SETTINGS, "max_steps": args.steps})
        pilots = [] if args.quick else trl_pilots(python, first, Path(scratch) / "pilot")
        threads, experts = (pilots[0]["threads"], pilots[0]["experts"]) if pilots else (1, "grouped_mm")
        runs = []
        for seed in range(args.seeds):
            config = run_config(f"bench-vs-trl-{seed}", warm, {**SETTINGS, "max_steps": args.steps, "seed": seed})
            ours = run_slipstream(config, Path(scratch) / "ours", args.snapshot_every)
            theirs = run_trl(python, config, Path(scratch) / "trl", args.snapshot_every, threads, experts)
            runs += [{"seed": seed, **score(run, config, args)} for run in (ours, theirs)]
            shutil.rmtree(Path(scratch) / "ours")
    report(args, runs, pilots, first)


def warm_model() -> Path:
    """models/bench-json-chain-warm, made (in minutes) when it is not there: it knows the form and prefers the wrong order."""
    warm = MODEL.with_name(f"{MODEL.name}-warm")
    if not (warm / "config.json").exists():
        config = run_config("bench-vs-trl", MODEL, SETTINGS)
        env, rng = load_env(config.envs[0], 0), np.random.default_rng(0)
        shown = [plain_messages(env.demonstration(env.task("train", i), rng)) for i in range(1000)]
        corpus = [render(CHAT_TEMPLATE, {"messages": m, "tools": None, "add_generation_prompt": False}) for m in shown]
        make_model(MODEL, "tiny-moe", corpus, seed=0, split="words", vocab_size=400)
        warm_up(config, warm)
    return warm


def score(run: dict[str, Any], config: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    """`run` with the held-out success of its snapshots, and when it first reached the target (None: never)."""
    success = {step: held_out_success(file, config, args.eval_tasks) for step, file in sorted(run.pop("snapshots").items())}
    times = run.pop("time_at_step")
    reached = next((step for step, value in success.items() if value >= args.target), None)
    steps = list(success)
    print(f"{run['system']}: success by step {json.dumps({str(step): round(value, 3) for step, value in success.items()})}", flush=True)
    return {
        **run,
        "time_s": None if reached is None else times[reached],
        "steps_to_target": reached,
        "success_first": success[steps[0]],
        "success_last": success[steps[-1]],
        "success_by_step": success,
        "seconds_by_step": {step: times[step] for step in steps},
    }


def held_out_success(weights: Path, config: RunConfig, tasks: int) -> float:
    """Share of held-out tasks answered rightly, greedily, by these weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(config.model.path, model, ignore=shutil.ignore_patterns("*.safetensors"))
        shutil.copyfile(weights, model / TENSORS_FILE)
        scored = evaluate(run_config("bench-vs-trl", model, {**SETTINGS, "eval": {"tasks": tasks}}))
    return scored[ENV["name"]]["avg_at_k"]


def report(args: argparse.Namespace, runs: Sequence[dict[str, Any]], pilots: Sequence[dict[str, Any]], config: RunConfig) -> None:
    ours, theirs = ([run for run in runs if run["system"] == system] for system in ("slipstream", "trl"))
    pairs = list(zip(ours, theirs, strict=True))
    times = [(our["time_s"], their["time_s"]) for our, their in pairs]
    reached = all(None not in pair for pair in times)
    headline = {
        "samples_ratio": median([our["samples_per_s"] / their["samples_per_s"] for our, their in pairs]),
        "time_ratio": median([their / our for our, their in times]) if reached else None,
    }
    shown = [f"{p['threads']} thread(s), {p['experts']}: " + (f"{p['step_s']:.2f} s" if p["step_s"] else "too long") for p in pilots]
    tried = ", ".join(shown) or "none"
    trl = theirs[0]["versions"]["trl"]
    notes = f"TRL {trl}; seconds per step in its pilot runs: {tried}. Target: {args.target} on {args.eval_tasks} tasks."
    settings = {**vars(args), "pilots": list(pilots), "run": config.model_dump(mode="json")}
    finish("rl_vs_trl", headline, runs, settings, COLUMNS, notes)


if __name__ == "__main__":
    main()
