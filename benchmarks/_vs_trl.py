"""The two sides of `benchmarks.rl_vs_trl`: each runs a job given as slipstream's run file and says how fast it was.

Both return: system, snapshots (file of weights by step), time_at_step (seconds since training began, by step), samples_per_s, step_s,
load_1min. Knows nothing of scores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._runs import ROOT, SKIPPED_STEPS, figures, launch
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.config.run import BySamples
from slipstream.envs.base import load_env
from slipstream.observe.history import History
from slipstream.transport.weights import TENSORS_FILE, list_versions, version_folder

TRL_PILOTS = [(threads, experts) for threads in (1, 2) for experts in ("grouped_mm", "eager")]
PILOT_STEPS, PILOT_TIMEOUT_S = 4, 90
TRL_TASKS = 4096


def run_slipstream(config: RunConfig, out: Path, every: int) -> dict[str, Any]:
    """A whole run; its published versions are linked into `out` while it goes on. Times are those of publishing, from version 0 on."""
    weights = config.folder / "weights"
    shutil.rmtree(config.folder, ignore_errors=True)
    out.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launch, config)
        snapshots: dict[int, Path] = {}
        while not running.done():
            snapshots |= _copy_new(weights, out, every, snapshots)
            time.sleep(0.1)
        found = figures(running.result())
        snapshots |= _copy_new(weights, out, every, snapshots)
    history = History(config.folder)
    history.poll()
    published = {span.step: span.end for span in history.find_spans("trainer", "publish")}
    return {
        "system": "slipstream",
        "snapshots": snapshots,
        "time_at_step": {step: end - published[0] for step, end in published.items()},
        "samples_per_s": found["samples_per_s"],
        "step_s": found["step_s"],
        "load_1min": found["load_1min"],
        "lag_mean": found["lag_mean"],
    }


def _copy_new(weights: Path, out: Path, every: int, known: Mapping[int, Path]) -> dict[int, Path]:
    """A run removes versions that nobody needs any more, so they are copied while it goes on."""
    fresh = {}
    for number in list_versions(weights):
        if number % every == 0 and number not in known:
            fresh[number] = out / f"v{number}.safetensors"
            shutil.copyfile(version_folder(weights, number) / TENSORS_FILE, fresh[number])
    return fresh


def run_trl(python: Path, config: RunConfig, out: Path, every: int, threads: int, experts: str) -> dict[str, Any]:
    result = _trl(python, config, out, every, threads, experts, timeout=None)
    ends = result["step_ends_s"]
    steps = np.diff(ends[SKIPPED_STEPS - 1 :])
    return {
        "system": "trl",
        "snapshots": {0: config.model.path / TENSORS_FILE}
        | {n: out / f"step_{n:06d}" / TENSORS_FILE for n in range(every, len(ends) + 1, every)},
        "time_at_step": dict(enumerate([0.0, *ends])),
        "samples_per_s": batch_samples(config) * len(steps) / float(steps.sum()),
        "step_s": float(np.median(steps)),
        "load_1min": os.getloadavg()[0],
        "versions": result["versions"],
    }


def _trl(python: Path, config: RunConfig, out: Path, every: int, threads: int, experts: str, timeout: float | None) -> dict[str, Any]:
    """What benchmarks._trl_worker wrote. Raises TimeoutExpired; ends the benchmark when TRL fails."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    job = {
        "model": str(config.model.path),
        "out": str(out),
        "threads": threads,
        "experts": experts,
        "steps": config.max_steps,
        "snapshot_every": every,
        "tasks": prompts(config),
        "batch": batch_samples(config),
        "group": config.envs[0].group_size,
        "max_tokens": config.envs[0].sampling.max_tokens,
        "optim": config.trainer.optim.model_dump(),
        "seed": config.seed,
    }
    (out / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [str(python), "-m", "benchmarks._trl_worker", str(out / "job.json")]
    print(f"$ TRL, {threads} thread(s), {experts}, {config.max_steps} steps", flush=True)
    with (out / "log").open("w+") as log:
        result = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=timeout, stdout=log, stderr=log)
        log.seek(0)
        if result.returncode:
            sys.exit(f"TRL ended with exit code {result.returncode}:\n{log.read()[-2000:]}")
    return json.loads((out / "result.json").read_text())


def trl_pilots(python: Path, config: RunConfig, out: Path) -> list[dict[str, Any]]:
    """Seconds per step of a few steps with each of TRL_PILOTS, the fastest first; last those that take too long (None)."""
    short, found = config.replace(max_steps=PILOT_STEPS), []
    for threads, experts in TRL_PILOTS:
        try:
            ends = _trl(python, short, out, PILOT_STEPS + 1, threads, experts, PILOT_TIMEOUT_S)["step_ends_s"]
            seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        except subprocess.TimeoutExpired:
            seconds = None
        found.append({"threads": threads, "experts": experts, "step_s": seconds})
    if all(pilot["step_s"] is None for pilot in found):
        sys.exit(f"TRL made no {PILOT_STEPS} steps in {PILOT_TIMEOUT_S} s with any of {TRL_PILOTS}: is the machine busy?")
    return sorted(found, key=lambda pilot: pilot["step_s"] or float("inf"))


def batch_samples(config: RunConfig) -> int:
    assert isinstance(config.orchestrator.batch, BySamples)
    return config.orchestrator.batch.samples


def prompts(config: RunConfig) -> list[dict[str, Any]]:
    """The tasks as text that is already rendered, with the tokens that TRL must find in it, and the one answer that has a reward."""
    tokenizer, env, tasks = ChatTokenizer.load(config.model.path), load_env(config.envs[0], config.seed), []
    for index in range(TRL_TASKS):
        task = env.task("train", index)
        messages = [{"role": "user", "content": task.payload["question"]}]
        text = tokenizer.render(messages)
        tasks.append({"prompt": text, "prompt_ids": tokenizer.encode(text).tolist(), "answer": task.payload["answer"]})
    return tasks
