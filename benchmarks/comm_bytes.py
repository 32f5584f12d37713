"""Bytes that expert, context and data parallelism send, counted at the collective, against the formulas by which a run is planned.

Each layout takes the gradients of one batch, a row of 1,024 tokens a process, in which every expert is chosen equally often. Every
collective of the step is seen, FSDP's own included, with the sizes of its arguments (`_comm_worker.Counted`). Bytes are those that the
leading process sends to others. Formulas (h hidden, K experts a token, b bytes a number, n processes, t tokens of a process, R of a row):

    EP        K h b a token and MoE layer for dispatch, the same for combine, (n - 1) / n of it to others; forward and backward, and
              forward again with recomputation
    FSDP      a layer's weights twice (forward, backward), embedding and head once: b P (n - 1) / n; gradients 4 P (n - 1) / n
    CP        all_gather: keys and values 2 G d b of own tokens to n - 1 others, forward and backward (they are not kept), and again with
              recomputation; float32 gradients back. ring: the same of those tokens only that later ones of the document need.
              ulysses: (2 H + 2 G) d b of own tokens, (n - 1) / n of it to others, forward and backward

    off       counted / formula - 1
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

from benchmarks._comm_worker import MODEL, ROW, layouts
from benchmarks.harness import finish
from slipstream.launch.ranks import free_port
from slipstream.launch.topology import ranks
from slipstream.models.spec import ModelSpec

COLUMNS = ("processes", "layout", "what", "counted", "formula", "off", "per token and layer")
LIMIT = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two processes only")
    worlds = (2,) if parser.parse_args().quick else (2, 4)
    runs = [row for world in worlds for row in compare(world, counted(world))]
    worst = max(abs(run["off"]) for run in runs)
    finish(
        "comm_bytes",
        {"worst_off": worst, "within_2_percent": worst <= LIMIT},
        runs,
        {"model": MODEL, "row": ROW, "worlds": worlds},
        COLUMNS,
    )


def counted(world: int) -> dict[str, dict[str, int]]:
    """By layout and use: bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        file, port = Path(scratch) / "sent.json", free_port()
        command = (sys.executable, "-m", "benchmarks._comm_worker", str(file))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [subprocess.Popen(command, env={**environment, **ranks(rank, world, port)}) for rank in range(world)]
        if sum(process.wait(300) for process in started):
            raise SystemExit("a process of the benchmark failed")
        return json.loads(file.read_text())


def compare(world: int, found: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    rows = []
    for layout in layouts(world):
        for what, formula, units in formulas(world, layout):
            got = found[layout].get(what, 0)
            each = None if units is None else got / units
            row = {"processes": world, "layout": layout, "what": what, "counted": got, "formula": round(formula), "off": got / formula - 1}
            rows.append({**row, "per token and layer": each})
    return rows


def formulas(world: int, layout: str) -> list[tuple[str, float, int | None]]:
    """(use, bytes, tokens x layers). One row a process, or in CP as many rows one after the other, of which each has 1/n."""
    spec, settings = ModelSpec.from_config(MODEL), layouts(world)[layout]
    n, b, again = world, 2 if settings.get("dtype") == "bfloat16" else 4, settings.get("recompute") == "layer"
    others, layers, ep = (n - 1) / n, spec.num_layers, settings.get("ep", 1)
    cp = settings.get("cp", 1)
    passes = n if cp > 1 else 1
    tokens = ROW  # a process works on so many in all, in either case
    experts = 0 if ep > 1 else spec.expert_params * spec.num_experts * layers
    layer_params = sum(spec.layer_params(i) for i in range(layers)) + experts
    result: list[tuple[str, float, int | None]] = [
        ("weights", passes * b * (2 * layer_params + spec.end_params) * others, None),
        ("gradients", passes * 4 * (layer_params + spec.end_params) * others, None),
    ]
    if ep > 1:
        result.append(("exchange", (2 + again) * 2 * tokens * layers * spec.top_k * spec.hidden * b * others, tokens * layers))
    keys_values = 2 * spec.num_kv_heads * spec.head_dim
    method = settings.get("cp_method", "all_gather") if cp > 1 else ""
    if method == "all_gather":
        logprobs = tokens * 8 * (n - 1)  # of the loss: log p and entropy of every token
        result.append(("gather", (2 + again) * tokens * layers * keys_values * b * (n - 1) + logprobs, tokens * layers))
        result.append(("scatter", tokens * layers * keys_values * 4 * (n - 1), tokens * layers))
    elif method == "ring":
        result.append(("ring", ring_tokens(n) * layers * keys_values * 4, tokens * layers))
    elif method == "ulysses":
        heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        result.append(("exchange", 2 * tokens * layers * heads * b * others, tokens * layers))
    return result


def ring_tokens(n: int) -> int:
    """Tokens of which the leading process sends something in a layer, for n rows of one document each. It has the first and the last of 2 n
    chunks: all others need its first one, forward and backward; its last one needs all of theirs, and gives back gradients."""
    chunk = ROW // (2 * n)
    return n * chunk * (2 * (n - 1) + (2 * n - 2))


if __name__ == "__main__":
    main()
