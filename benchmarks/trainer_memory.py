"""How much memory each process of the trainer takes, to load a model and to step, against what the layout says it should.

    load   the weights that it keeps (float32), and nothing else: files are mapped, and copied from there
    step   weights, gradients and both moments of what it keeps (16 bytes a weight), and what FSDP gathers (`step_bytes`)

Measured: the most resident private memory that no file backs (RssAnon of /proc/self/status, sampled every half millisecond), less what the
process had after a step of a tiny model. Not in it: mapped model files and libraries, which the system takes back when it needs to. The C
library returns every block of 64 KiB or more at once here (MALLOC_MMAP_THRESHOLD_), so that memory is counted that is in use.

    limit_ok   loading took at most model / processes + the largest tensor + 10%
    worst_load, worst_step   largest relative difference of a process from the figure
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import finish
from slipstream.models import hf
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec

COLUMNS = (
    "layout",
    "rank",
    "own_mib",
    "load_mib",
    "load_figure_mib",
    "load_limit_mib",
    "step_mib",
    "step_figure_mib",
    "load_off",
    "step_off",
)
LAYOUTS: Mapping[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "2: FSDP": (2, {}),
    "2: EP 2": (2, {"ep": 2}),
    "4: FSDP": (4, {}),
    "4: EP 2 x FSDP": (4, {"ep": 2}),
    "4: EP 4": (4, {"ep": 4}),
}
MODEL: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 384,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
TINY = {"vocab_size": 32, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = 32
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half of the layers, and no more than two processes: to see that it works")
    args = parser.parse_args()
    config = {**MODEL, "num_hidden_layers": 8} if args.quick else MODEL
    layouts = {name: values for name, values in LAYOUTS.items() if values[0] <= 2 or not args.quick}
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, config)
        for name, (processes, layout) in layouts.items():
            print(f"{name} ...", flush=True)
            runs += measure(name, folder, processes, layout, Path(scratch))
    headline = {
        "model_mib": round(sum(sizes(ModelSpec.from_config(config)).values()) / MIB, 1),
        "limit_ok": all(run["load_mib"] <= run["load_limit_mib"] for run in runs),
        "worst_load": round(max(abs(run["load_off"]) for run in runs), 3),
        "worst_step": round(max(abs(run["step_off"]) for run in runs), 3),
    }
    finish("trainer_memory", headline, runs, {**vars(args), "model": config, "tokens": TOKENS}, COLUMNS)


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    (folder / "tiny.json").write_text(json.dumps({**config, **TINY, "num_key_value_heads": 2}))
    hf.write_tensors(folder, hf.hf_tensors(build_model(ModelSpec.from_config(dict(config)))), shard_bytes=32 * MIB)


def sizes(spec: ModelSpec) -> dict[str, int]:
    """float32 bytes of each parameter."""
    return {name: 4 * p.numel() for name, p in build_model(spec, device="meta").named_parameters()}


def measure(name: str, folder: Path, processes: int, layout: dict[str, int], scratch: Path) -> list[dict[str, Any]]:
    out = scratch / name.replace(":", "").replace(" ", "-")
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    common["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)
    command = [sys.executable, "-m", "benchmarks._memory_worker", str(folder), json.dumps(layout), str(out), str(TOKENS)]
    started = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(processes)]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{name}: a process failed, see above")
    spec = ModelSpec.from_folder(folder)
    whole = sizes(spec)
    largest = max(4 * torch.Size(t.shape).numel() for t in hf.TensorFiles(folder).values())
    load_figure, step_figure = sum(whole.values()) / processes, step_bytes(spec, processes, layout.get("ep", 1))
    rows = []
    for rank in range(processes):
        found = json.loads((out / f"{rank}.json").read_text())
        rows.append(
            {
                "layout": name,
                "rank": rank,
                "own_mib": found["own"] / MIB,
                "load_mib": found["load"] / MIB,
                "load_figure_mib": load_figure / MIB,
                "load_limit_mib": (load_figure + largest) * 1.1 / MIB,
                "step_mib": found["step"] / MIB,
                "step_figure_mib": step_figure / MIB,
                "load_off": found["load"] / load_figure - 1,
                "step_off": found["step"] / step_figure - 1,
            }
        )
    return rows


def step_bytes(spec: ModelSpec, processes: int, ep: int) -> float:
    """The most that a step holds in a process, without activations, of which a few tokens have next to none.

    Weights, gradients and two moments of what it keeps. Of several processes also what FSDP gathers: embedding, norm and head, and the
    gradient of the head, throughout; and of the layer in hand its weights, its gradients, and the copy of them that is reduced.
    """
    whole = sizes(spec)
    kept = 16 * sum(whole.values()) / 4 / processes
    if processes == 1:
        return kept
    ends = sum(size for name, size in whole.items() if not name.startswith("layers.")) + whole["head"]
    first = {name: size for name, size in whole.items() if name.startswith("layers.0.")}
    layer = sum(size / ep if ".experts." in name else size for name, size in first.items())
    return kept + ends + 3 * layer


if __name__ == "__main__":
    main()
