"""Wide expert parallelism: engine processes that share the experts of one model against one process that has them all.

A tiny GLM-4.5-like MoE (64 experts, 8 a token, three MoE layers) whose routing bias is drawn at random, so that some experts are chosen far
more often than others. 4 and 32 processes play the same sampled requests as one does, in rounds of new ones; the last process has no
request and only serves experts. After the first round the experts are placed by the load that was seen, with one spare place in each
process for copies.

    identical         every token of every request, in every round, before and after experts moved
    logprob_diff      largest difference of a logprob from that of one process (another order of float32 sums: fused kernel, batch sizes)
    imbalance         pairs of a token and an expert that the busiest process computed, over the mean; averaged over layers
    dispatch, combine milliseconds a step and MoE layer until the tokens, or the results, of all processes have come; on a machine with
                      fewer cores than processes that is mostly waiting for a turn: a smoke run of the protocol, not of the speed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish, median
from slipstream.launch.local import free_port
from slipstream.launch.topology import ranks
from slipstream.models import hf
from slipstream.models.load import build_model
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec
from slipstream.parallel.placement import imbalance

MODEL = {
    **PRESETS["tiny-glm"],
    "vocab_size": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "eos_token_id": 0,
}
BIAS = 0.12
"""Standard deviation of the routing bias; scores are sigmoids of logits with a standard deviation of about 1."""
COLUMNS = (
    *("processes", "experts each", "identical", "logprob_diff", "imbalance before", "imbalance after", "moved"),
    *("dispatch ms", "compute ms", "combine ms", "vote ms", "rss mib"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four processes only")
    worlds = (4,) if parser.parse_args().quick else (4, 32)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder)
        runs = [row(folder, world, {"requests": 62, "tokens": 16 if world == 32 else 32, "rounds": 3, "redundant": 1}) for world in worlds]
    by_world = {run["processes"]: run for run in runs}
    headline: dict[str, Any] = {}
    for world, run in by_world.items():
        headline |= {f"identical_{world}": run["identical"], f"logprob_diff_{world}": run["logprob_diff"]}
        headline |= {f"imbalance_before_{world}": run["imbalance before"], f"imbalance_after_{world}": run["imbalance after"]}
    finish("wide_ep", headline, runs, {"model": MODEL, "bias": BIAS, "worlds": worlds}, COLUMNS)


def make_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = build_model(ModelSpec.from_folder(folder), seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("router_bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * BIAS
    hf.write_tensors(folder, hf.hf_tensors(model))


def row(folder: Path, world: int, job: dict[str, Any]) -> dict[str, Any]:
    (folder / "job.json").write_text(json.dumps(job))
    (alone,), found = started(folder, 1), started(folder, world)
    worst, same = 0.0, True
    for number, expected in enumerate(alone["rounds"]):
        merged = {name: said for rank in found for name, said in rank["rounds"][number].items()}
        same = same and merged.keys() == expected.keys() and all(merged[name][0] == expected[name][0] for name in expected)
        if same:
            worst = max(worst, *(float(np.abs(np.subtract(merged[name][1], expected[name][1])).max()) for name in expected))
    load = [imbalance(np.array([rank["served"][number] for rank in found]).T) for number in range(job["rounds"])]
    return {
        "processes": world,
        "experts each": found[0]["slots"],
        "identical": same,
        "logprob_diff": worst,
        "imbalance before": load[0],
        "imbalance after": load[-1],
        "moved": sum(rank["moved"] for rank in found),
        "rebalances": found[0]["rebalances"],
        **{f"{name} ms": median([value for rank in found for value in rank[f"{name}_ms"]]) for name in ("dispatch", "compute", "combine")},
        "vote ms": median([rank["vote_ms"] for rank in found]),
        "rss mib": median([rank["rss_mib"] for rank in found]),
        "idle steps of the last": found[-1]["idle_steps"],
        "steps": found[0]["votes"],
        "seconds by round": found[0]["seconds"],
        "seconds by round, one process": alone["seconds"],
        "load by round": load,
    }


def started(folder: Path, world: int) -> list[dict[str, Any]]:
    """What each process has written."""
    port, command = free_port(), (sys.executable, "-m", "benchmarks._wide_worker", str(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env={**environment, **ranks(rank, world, port)}) for rank in range(world)]
    try:
        if any(process.wait(1200) for process in processes):
            raise SystemExit("a process of the benchmark failed")
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


if __name__ == "__main__":
    main()
