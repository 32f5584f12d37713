"""How near the trainer's step and the engine's decode step come to what one thread of this machine can do, and where the rest goes.

    trainer_frac  time that the step's matrix products would take at the rate at which torch alone does products of these sizes (forward
                  and both gradients), by the time of the step: the model's FLOPs, no recomputation, one optimizer step on 128 rollouts of
                  the quickstart
    decode_frac   least time of a decode step by the roofline (FLOPs at the best rate of any large product, or bytes of weights and KV at
                  the read rate of that much memory, whichever takes longer), by the time of the step, by batch size

Times are CPU time of one thread: on an idle machine the wall clock shows the same. The breakdown of the trainer is torch's profiler's, that
of decoding is cProfile's; both are shares of the step.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks._ceilings import decode_work, matmul_rate, peak_rate, read_rate, training_products
from benchmarks._runs import run_config, warm_model
from benchmarks.engine import checkpoint
from benchmarks.harness import finish, median, spread
from benchmarks.replay_kl import sample_rows
from slipstream.config import RunConfig
from slipstream.config.serve import EngineConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.models.load import load_model
from slipstream.trainer.step import Learner
from slipstream.types import Batch, GenerateRequest, Sampling

COLUMNS = ("part", "what", "ms", "gflops", "gbytes_per_s", "share", "frac", "spread")
BATCHES = (1, 32, 128)
PROMPT_TOKENS, WARM_TOKENS = 64, 16
"""Of each sequence before decoding is timed: a context of 80 tokens, growing by one a step."""
TRAINER_PARTS: Mapping[str, tuple[str, ...]] = {
    "experts": ("_Experts",),
    "matmul (qkv, out, router, head)": ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul"),
    "attention": ("_DocAttention",),
    "norms and rope": ("_RmsNorm", "_Rope", "autograd::engine::evaluate_function: _RmsNorm"),
    "routing": ("aten::topk", "aten::gather", "aten::_softmax", "aten::softmax", "aten::eq", "aten::scatter"),
    "loss head": ("_TokenLogprobs",),
    "optimizer": ("Optimizer", "aten::_fused_adamw", "aten::linalg_vector_norm", "aten::_foreach"),
}
"""Profiled operations by prefix; what fits none is 'other operations'."""
DECODE_PARTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "schedule": (("scheduler.py", "plan"),),
    "gather the batch": (("runner.py", "_flat"),),
    "layers": (("ops/fused.py", "forward"), ("runner.py", "_forward")),
    "head": (("decoder.py", "logits"),),
    "sample": (("engine/sampler.py", "sample"),),
    "append": (("sequence.py", "append_sampled"), ("sequence.py", "sample_params")),
}
"""Functions by file and name, with all that they call; what is in none is 'rest of the step'."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed optimizer steps")
    parser.add_argument("--decode-steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few steps: to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.decode_steps = 3, 40
    torch.set_num_threads(1)
    config = run_config("bench-limits", warm_model(), {})
    runs = [{"part": "machine", "what": "best large matmul", "gflops": peak_rate() / 1e9}]
    runs += [{"part": "machine", "what": f"read {size >> 20} MiB", "gbytes_per_s": read_rate(size) / 1e9} for size in (1 << 20, 256 << 20)]
    trainer = trainer_rows(config, args.steps)
    decode_fracs: dict[str, dict[int, float]] = {}
    with without_end(config.model.path) as quickstart:
        for name, folder in (("quickstart", quickstart), ("small-moe", checkpoint("small-moe"))):
            measured = {batch: decode_rows(name, folder, batch, args.decode_steps) for batch in BATCHES}
            decode_fracs[name] = {batch: rows[0]["frac"] for batch, rows in measured.items()}
            trainer += [row for rows in measured.values() for row in rows]
    headline = {
        "trainer_frac": next(row["frac"] for row in trainer if row["what"] == "step"),
        "decode_frac": {str(batch): frac for batch, frac in decode_fracs["quickstart"].items()},
        "decode_frac_small_moe": {str(batch): frac for batch, frac in decode_fracs["small-moe"].items()},
    }
    finish("limits", headline, runs + trainer, {**vars(args), "run": config.model_dump(mode="json")}, COLUMNS)


# ---- the trainer's step ----


def trainer_rows(config: RunConfig, steps: int) -> list[dict[str, Any]]:
    """The step, the ceilings of its products, and where its time goes."""
    batch = realistic_batch(config)
    model = load_model(config.model.path)
    still = config.trainer.optim.replace(lr=1e-12)  # the same work in every step: no ratio drifts out of the loss's mask
    learner = Learner(model, config.trainer, still, max_steps=steps)
    learner.step(batch)
    seconds = [cpu_s(lambda: learner.step(batch)) for _ in range(steps)]
    step_s = median(seconds)

    documents = [np.diff(row.doc_starts_D) for row in batch.micro_batches]
    products = training_products(model.spec, documents, batch.loss_tokens)
    rows, least_s = [], 0.0
    for product in products:
        rate = matmul_rate(product.rows, product.inner, product.out, product.batch)
        least_s += 3 * product.flops / rate
        shape = f"{product.name} [{product.rows}, {product.inner}] x [{product.inner}, {product.out}]"
        rows.append({"part": "trainer", "what": f"ceiling: {shape}", "gflops": rate / 1e9, "share": 3 * product.flops / rate / step_s})
    flops = 3 * sum(product.flops for product in products)
    step = {"part": "trainer", "what": "step", "ms": step_s * 1e3, "gflops": flops / step_s / 1e9, "frac": least_s / step_s}
    return [{**step, "spread": spread(seconds)}, *rows, *trainer_breakdown(lambda: learner.step(batch), step_s)]


def realistic_batch(config: RunConfig) -> Batch:
    """128 rollouts of the run's environment, as the orchestrator packs them, routing included."""
    rows = asyncio.run(sample_rows(config, {"dtype": "float32"}, 1))
    samples = sum(len(row.doc_starts_D) - 1 for row in rows)
    loss_tokens = sum(int(row.loss_mask_T.sum()) for row in rows)
    ones_S = np.ones(samples, np.float32)
    return Batch(1, rows, loss_tokens, tuple(str(i) for i in range(samples)), ones_S, ones_S)


def trainer_breakdown(step: Callable[[], object], step_s: float) -> list[dict[str, Any]]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        step()
        wall_s = time.perf_counter() - began
    seconds: dict[str, float] = dict.fromkeys([*TRAINER_PARTS, "other operations"], 0.0)
    for event in profiled.key_averages():
        part = next((name for name, prefixes in TRAINER_PARTS.items() if event.key.startswith(prefixes)), "other operations")
        seconds[part] += event.self_cpu_time_total / 1e6
    seconds["Python between operations"] = max(0.0, wall_s - sum(seconds.values()))
    return breakdown("trainer", seconds, step_s)


# ---- the decode step ----


def decode_rows(name: str, folder: Path, batch: int, steps: int) -> list[dict[str, Any]]:
    """The step at this batch size, then where its time goes."""
    engine = decoding_engine(folder, batch, 2 * steps)
    seconds = [cpu_s(engine.step) for _ in range(steps)]
    step_s, context = median(seconds), PROMPT_TOKENS + WARM_TOKENS + steps / 2
    work = decode_work(engine.spec, batch, context)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        engine.step()
    profiler.disable()
    part = f"decode {name} x{batch}"
    step = {
        "part": part,
        "what": f"step: {work.flops / 1e6:.1f} MFLOP, {work.num_bytes / 2**20:.1f} MiB at {read_rate(int(work.num_bytes)) / 1e9:.1f} GB/s",
        "ms": step_s * 1e3,
        "gflops": work.flops / step_s / 1e9,
        "gbytes_per_s": work.num_bytes / step_s / 1e9,
        "frac": work.least_s() / step_s,
        "spread": spread(seconds),
    }
    return [step, *breakdown(part, decode_parts(pstats.Stats(profiler)), step_s)]


def decoding_engine(folder: Path, batch: int, steps: int) -> EmbeddedEngine:
    """An engine in which `batch` sequences decode for at least `steps` more steps."""
    length = PROMPT_TOKENS + WARM_TOKENS + steps + 8
    engine = EmbeddedEngine(folder, EngineConfig(max_running=128, kv_memory_mib=512), seq_len=length)
    rng = np.random.default_rng(0)
    for i in range(batch):
        prompt_T = rng.integers(0, engine.spec.vocab_size, PROMPT_TOKENS, dtype=np.int32)
        engine.add(GenerateRequest(str(i), prompt_T, Sampling(max_tokens=length - PROMPT_TOKENS)))
    while engine.state().waiting or engine.tokens_generated < batch * WARM_TOKENS:
        engine.step()
    return engine


def decode_parts(stats: pstats.Stats) -> dict[str, float]:
    """CPU seconds by part, over all profiled steps."""
    cumulative = {(file, name): values[3] for (file, _, name), values in stats.stats.items()}  # pyright: ignore[reportAttributeAccessIssue]

    def of(end: str, wanted: str) -> float:
        return sum(seconds for (file, name), seconds in cumulative.items() if file.endswith(end) and name == wanted)

    parts = {part: max(of(*function) for function in functions) for part, functions in DECODE_PARTS.items()}
    return {**parts, "rest of the step": of("engine/engine.py", "step") - sum(parts.values())}


@contextmanager
def without_end(folder: Path) -> Iterator[Path]:
    """The model without anything that names an end-of-sequence token, so that it decodes for as long as it is asked to."""
    with tempfile.TemporaryDirectory() as scratch:
        config = json.loads((folder / "config.json").read_text())
        (Path(scratch) / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        for file in folder.glob("*.safetensors"):
            shutil.copy(file, scratch)
        yield Path(scratch)


# ---- both ----


def cpu_s(fn: Callable[[], object]) -> float:
    began = time.process_time()
    fn()
    return time.process_time() - began


def breakdown(part: str, seconds: Mapping[str, float], step_s: float) -> list[dict[str, Any]]:
    """Shares of what was profiled, largest first; milliseconds are those shares of the step as timed without a profiler."""
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [{"part": part, "what": f"  {name}", "ms": s / total * step_s * 1e3, "share": s / total} for name, s in ordered]


if __name__ == "__main__":
    main()
