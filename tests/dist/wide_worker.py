"""One rank of an engine group of a test: runs every case, one after the other, since starting takes longer than any of them.

python -m tests.dist.wide_worker FOLDER, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Writes FOLDER/rank<n>.pt.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.wide.engine import WideEngine
from slipstream.errors import EngineUnavailable
from slipstream.parallel.placement import imbalance
from slipstream.parallel.wide import WideGroup, joined
from slipstream.transport.weights import fingerprint_file
from slipstream.types import PolicyVersion
from tests.dist.wide_cases import ALL_AT_ONCE, SEQ_LEN, SERVED, WORLD, one_by_one, plain, request, requests, run, settings


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(800, exit=True)  # where a worker hangs is what one wants to know
    found: dict[str, Any] = {}
    with joined(settings().ep) as group:
        for name in SERVED:
            found[name] = served(group, folder / name)
        found["bfloat16"] = served(group, folder / "qwen3_moe", dtype="bfloat16")
        found["copies"] = served(group, folder / "qwen3_moe", redundant_experts=2)
        found["at once"] = at_once(group, folder / "qwen3_moe")
        found["commit"] = commit(group, folder)
        found["failed"] = failed_step(group, folder / "qwen3_moe")
        found["moved"] = moved(group, folder / "skewed")
        found["lost"] = lost(group, folder / "qwen3_moe", lambda: torch.save(found, folder / f"rank{group.rank}.pt"))
        torch.save(found, folder / f"rank{group.rank}.pt")
        os._exit(0)  # the group is broken: there is nothing to leave in order


def served(group: WideGroup, folder: Path, dtype: str = "float32", **ep) -> dict[str, Any]:
    engine = WideEngine(group, folder, settings(dtype, **ep), SEQ_LEN)
    done = run(engine, requests(group.rank))
    shared = engine.shared
    seconds = {name: float(getattr(shared, f"{name}_s_L").min()) for name in ("dispatch", "compute", "combine")}
    held = {name: p.shape[0] for name, p in engine._wide.model.named_parameters() if ".experts." in name}
    return {
        "done": plain(done),
        "idle": engine.idle_steps,
        "votes": engine._votes,
        "served": shared.served_L.tolist(),
        "asked": shared.load_LE.sum(1).tolist(),
        "seconds": seconds,
        "held": held,
        "asleep": not engine.has_work,
    }


def at_once(group: WideGroup, folder: Path) -> dict[str, Any]:
    """Shared experts with everything else that an engine can do."""
    engine = WideEngine(group, folder, settings().replace(**ALL_AT_ONCE), SEQ_LEN)
    done = one_by_one(engine, group.rank)
    tiers = [tier for completion in done.values() for tier in completion.cached_by_tier]
    return {"done": plain(done), "accepted": engine.speculation.accepted, "tiers": tiers}


def commit(group: WideGroup, folder: Path) -> dict[str, Any]:
    """Each rank is asked for the next version at another time."""
    engine = WideEngine(group, folder / "qwen3_moe", settings(), SEQ_LEN)
    version = PolicyVersion(1, fingerprint_file(folder / "next" / "model.safetensors")[0], 0, str(folder / "next"))
    live: list[int] = []
    steps = 0

    def each_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 1 + 2 * group.rank:
            engine.prepare(version)
            engine.commit(1)
        live.append(engine.state().live_version)

    done = run(engine, [request(group.rank, tokens=24)], each_step)
    again = run(engine, [request(group.rank + 10, tokens=4)])
    return {"live": live, "done": plain(done), "versions": [c.versions for c in (done | again).values()], "again": plain(again)}


def failed_step(group: WideGroup, folder: Path) -> dict[str, Any]:
    """Attention fails once on rank 1, between two MoE layers."""
    engine = WideEngine(group, folder, settings(), SEQ_LEN)
    attention = engine._wide.model.layers[2].attention  # type: ignore[index]
    steps, failures, lost_ids, done = 0, 0, [], {}
    for one in requests(group.rank) if group.rank < 3 else []:
        engine.add(one)
    engine._awake = True
    while engine.has_work:
        steps += 1
        if group.rank == 1 and steps == 5:
            attention.forward = None
        try:
            done |= {completion.id: completion for completion in engine.step().finished}
        except TypeError:
            failures += 1
            lost_ids = engine.recover()
        finally:
            vars(attention).pop("forward", None)
    for name in sorted(lost_ids):
        engine.add(request(int(name[1:])))
    engine._awake = True
    while engine.has_work:
        done |= {completion.id: completion for completion in engine.step().finished}
    return {"failures": failures, "lost": lost_ids, "done": plain(done)}


def moved(group: WideGroup, folder: Path) -> dict[str, Any]:
    """A router that prefers two experts, before and after experts have moved."""
    config = settings(prefix_cache=False, redundant_experts=1, rebalance_steps=30)  # a hit would change the sizes of matrix products
    engine = WideEngine(group, folder, config, SEQ_LEN)
    asked = [request(number, tokens=40, temperature=0.0) for number in range(group.rank, 16, WORLD)]
    rounds, loads, at = [], [], engine.shared.placement
    before_L = engine.shared.served_L.copy()
    for _ in range(3):
        rounds.append(plain(run(engine, asked)))
        loads.append((engine.shared.served_L - before_L).tolist())
        before_L = engine.shared.served_L.copy()
    served_LR = [torch.tensor([each[i] for each in group.exchange(loads)]).T.numpy() for i in range(3)]
    return {
        "rounds": rounds,
        "imbalance": [imbalance(load_LR) for load_LR in served_LR],
        "first": at.experts_LRS,
        "last": engine.shared.placement.experts_LRS,
        "rebalances": engine.rebalances,
        "moved": engine.moved_experts,
        "gauges": (engine.imbalance_before, engine.imbalance),
    }


def lost(group: WideGroup, folder: Path, save) -> dict[str, Any]:
    """The last rank is killed while the others wait for it."""
    engine = WideEngine(group, folder, settings(), SEQ_LEN)
    if group.rank == WORLD - 1:
        save()
        os.kill(os.getpid(), signal.SIGKILL)
    engine.add(request(0))
    began = time.perf_counter()
    found: list[str] = []
    try:
        engine.step()
    except EngineUnavailable as error:
        found.append(str(error))
    seconds = time.perf_counter() - began
    for again in (engine.recover, engine.step):
        try:
            again()
        except EngineUnavailable as error:
            found.append(str(error))
    return {"errors": found, "seconds": seconds}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
