"""One rank of `benchmarks.wide_ep`: plays its share of the requests in rounds, and writes what came out.

python -m benchmarks._wide_worker FOLDER, with RANK and WORLD_SIZE as torchrun sets them (or alone). FOLDER has the model, and job.json:
how many requests, tokens and rounds. Writes FOLDER/<world>-<rank>.json.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from slipstream.config.serve import EngineConfig
from slipstream.config.wide import WideConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.wide.engine import WideEngine
from slipstream.parallel.wide import joined
from slipstream.types import GenerateRequest, Sampling

SEQ_LEN = 256


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        found = played(EmbeddedEngine(folder, config(1, job), SEQ_LEN), job, 0, 1)
    else:
        with joined(config(world, job).ep) as group:
            engine = WideEngine(group, folder, config(world, job), SEQ_LEN)
            found = played(engine, job, rank, world) | of_group(engine, job)
            engine.close()
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))


def config(world: int, job: dict[str, Any]) -> EngineConfig:
    wide = {"redundant_experts": job["redundant"], "rebalance_steps": job["tokens"] - 1, "timeout_s": 300.0} if world > 1 else {}
    ep = WideConfig(ranks=world, **wide)
    return EngineConfig(replicas=world, ep=ep, kv_memory_mib=8, max_running=64, prefix_cache=False)


def played(engine: EmbeddedEngine, job: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Each round has requests of its own. The last rank has none: it only serves experts."""
    busy = max(1, world - 1)
    own = range(rank, job["requests"], busy) if rank < busy else range(0)
    rounds, seconds, served = [], [], []
    for number in range(job["rounds"]):
        before = served_pairs(engine)
        began = time.perf_counter()
        rounds.append(play(engine, [request(i + number * job["requests"], engine.spec.vocab_size, job["tokens"]) for i in own]))
        seconds.append(time.perf_counter() - began)
        served.append((served_pairs(engine) - before).tolist())
    rss_mib = psutil.Process().memory_info().rss / 2**20
    return {"rounds": rounds, "seconds": seconds, "served": served, "rss_mib": rss_mib}


def play(engine: EmbeddedEngine, asked: list[GenerateRequest]) -> dict[str, Any]:
    for one in asked:
        engine.add(one)
    while not asked and isinstance(engine, WideEngine) and not engine.heard():  # a ring may be left over from the round before
        select.select([engine.bell], [], [], 300)
    done = {}
    while engine.has_work:
        for completion in engine.step().finished:
            done[completion.id] = completion.tokens_N.tolist(), completion.logprobs_N.tolist()
    return done


def request(number: int, vocab: int, tokens: int) -> GenerateRequest:
    prompt_T = np.random.default_rng(number).integers(0, vocab, 8 + number % 9).astype(np.int32)
    return GenerateRequest(f"r{number}", prompt_T, Sampling(temperature=1.0, seed=number, max_tokens=tokens))


def served_pairs(engine: EmbeddedEngine) -> np.ndarray:
    return engine.shared.served_L.copy() if isinstance(engine, WideEngine) else np.zeros(len(engine.spec.moe_layers), np.int64)


def of_group(engine: WideEngine, job: dict[str, Any]) -> dict[str, Any]:
    shared, steps = engine.shared, engine._votes
    each = {f"{name}_ms": (getattr(shared, f"{name}_s_L") / steps * 1e3).tolist() for name in ("dispatch", "compute", "combine")}
    return each | {
        "votes": steps,
        "vote_ms": engine.vote_s / steps * 1e3,
        "idle_steps": engine.idle_steps,
        "slots": shared.placement.num_slots,
        "rebalances": engine.rebalances,
        "moved": engine.moved_experts,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
