"""One rank of an engine group whose experts are codes and scales: python -m tests.dist.wide_fp8_worker FOLDER, with the variables of torchrun.

Runs every case, one after the other. Writes FOLDER/rank<n>-of-<world>.pt.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.wide.engine import WideEngine
from slipstream.parallel.wide import WideGroup, joined
from slipstream.transport.weights import fingerprint_file
from slipstream.types import GenerateRequest, PolicyVersion
from tests.dist.wide_cases import SEQ_LEN, plain, request, run, settings

MODELS = ("qwen3_moe", "uneven", "glm4_moe", "gpt_oss")
VERSIONS = ("next", "next-float8")
"""The same weights in float32, quantised when they are loaded, and published in FP8."""


def own(rank: int, world: int) -> list[GenerateRequest]:
    """The last of several ranks has none: it only serves experts."""
    return [request(number) for number in range(6) if number % max(1, world - 1) == rank]


def asked_twice(rank: int, world: int) -> list[GenerateRequest]:
    return [request(number, tokens=40, temperature=0.0) for number in range(rank, 16, world)]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(500, exit=True)
    world = int(sys.argv[2])
    found: dict[str, Any] = {}
    with joined(settings(ranks=world).ep) as group:
        for name in MODELS:
            engine = made(group, folder / name)
            found[name] = plain(run(engine, own(group.rank, world)))
            found[f"{name} bytes"] = engine.weight_bytes
        engine = WideEngine(group, folder / "qwen3_moe", settings("float8", ranks=world).replace(fp8_scales="power_of_two"), SEQ_LEN)
        found["power of two"] = plain(run(engine, own(group.rank, world)))
        found["versions"] = [committed(group, folder, name) for name in VERSIONS]
        found["moved"] = moved(group, folder / "skewed")
    torch.save(found, folder / f"rank{group.rank}-of-{world}.pt")


def made(group: WideGroup, folder: Path, **ep: Any) -> WideEngine:
    return WideEngine(group, folder, settings("float8", ranks=group.size, **ep), SEQ_LEN)


def committed(group: WideGroup, folder: Path, name: str) -> dict[str, Any]:
    """What is said under a version that comes later, and by a fresh copy of it once the first one is used again."""
    engine, rounds = made(group, folder / "qwen3_moe"), []
    fingerprint = fingerprint_file(folder / name / "model.safetensors")[0]
    for number in (1, 2, 3):
        engine.prepare(PolicyVersion(number, fingerprint, number - 1, str(folder / name)))
        engine.commit(number)
        while engine.pending is not None:
            engine.step()
        rounds.append(plain(run(engine, own(group.rank, group.size))))
    return {"rounds": rounds, "bytes": engine.weight_bytes}


def moved(group: WideGroup, folder: Path) -> dict[str, Any]:
    """Experts with copies, before and after they have moved."""
    config = settings("float8", prefix_cache=False, ranks=group.size, redundant_experts=1, rebalance_steps=30)
    engine = WideEngine(group, folder, config, SEQ_LEN)
    first = engine.shared.placement.experts_LRS
    rounds = [plain(run(engine, asked_twice(group.rank, group.size))) for _ in range(3)]
    return {"rounds": rounds, "moved": engine.moved_experts, "first": first, "last": engine.shared.placement.experts_LRS}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
