"""What the engine saves by holding weights and KV in FP8, and how far its policy is then from the trainer's.

Bytes are counted from the storages of what an engine holds, for the quickstart's model and the larger preset; resident memory of a process
that has just made it is the cross-check. Errors and KL are of the quickstart's model after its warm-up, on rollouts that the engine itself
samples at temperature 1. One process, no servers; the products are emulated, so times say nothing about FP8 hardware.

    weight_bytes_ratio     bytes of all weights, FP8 / bfloat16, of the larger preset; *_tiny: of the quickstart's model
    matrices_bytes_ratio   the same of the matrices of the precision map alone: what a model approaches as it grows
    kv_bytes_ratio         bytes of a block of keys and values, FP8 / bfloat16
    kl_without, kl_with    mean over sampled tokens of k3(p_trainer / p_engine), without and with router replay, of an engine with weights
                           and KV in FP8 against a trainer in bfloat16; *_fp8_trainer: against one in FP8
    replay_gain            kl_without / kl_with
    logit_error            norm of (logits - float32 logits) / norm of the float32 logits, on the same tokens with the same experts; each
                           token's logits less their mean
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks._rounded_kv import RoundedKv
from benchmarks._runs import run_config, warm_model
from benchmarks.harness import finish
from benchmarks.replay_kl import compare, sample_rows
from slipstream.config import RunConfig, validate
from slipstream.config.serve import EngineConfig
from slipstream.config.train import TrainerConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.kv import KvCache
from slipstream.engine.room import MIB, block_bytes
from slipstream.engine.weights import LiveWeights
from slipstream.models.context import FullContext
from slipstream.models.fp8 import resident_bytes
from slipstream.models.hf import hf_tensors, write_tensors
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import build_model, load_model
from slipstream.models.maker import PRESETS
from slipstream.models.matrices import fused_columns
from slipstream.models.spec import ModelSpec
from slipstream.trainer.precision import Weights
from slipstream.types import MicroBatch

BOTH = "float8 + KV"
ENGINES: Mapping[str, Mapping[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float8": {"dtype": "float8"},
    BOTH: {"dtype": "float8", "kv_dtype": "float8"},
}
COLUMNS = (
    *("of", "engine", "replay", "weight_mib", "matrices_mib", "kv_mib", "rss_weights_mib", "rss_kv_mib"),
    *("kl", "kl_error", "flip_frac", "logit_error"),
)
"""`of`: the model, or the trainer that the engine is compared with."""
BLOCK = 16
LARGE = {"hidden_size": 512, "moe_intermediate_size": 512, "head_dim": 64, "vocab_size": 2048}
"""The larger preset made large enough for resident memory to say something: 70M parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000, help="sampled tokens, at least, for each kind of engine")
    parser.add_argument("--quick", action="store_true", help="2,000 tokens: to see that it works")
    args = parser.parse_args()
    config = run_config("bench-fp8-engine", warm_model(), {})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        memory = [
            *memory_rows("tiny-moe, warm", config.model.path),
            *memory_rows("small-moe", preset(Path(scratch) / "small", "small-moe")),
        ]
        memory += memory_rows("small-moe, widened", preset(Path(scratch) / "wide", "small-moe", LARGE), rss=True)
    mismatch = list(mismatch_rows(config, 2_000 if args.quick else args.tokens))
    setting = {**config.model_dump(mode="json"), "tokens": 2_000 if args.quick else args.tokens}
    finish("fp8_engine", headline(memory, mismatch), [*memory, *mismatch], setting, COLUMNS)


def headline(memory: Sequence[Mapping[str, Any]], mismatch: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    def ratio(key: str, model: str) -> float:
        sizes = {row["engine"]: row[key] for row in memory if row["of"] == model}
        return sizes[BOTH] / sizes["bfloat16"]

    def kl(trainer: str, replay: bool) -> float:
        wanted = {"kind": "kl", "of": trainer, "engine": BOTH, "replay": replay}
        return next(row["kl"] for row in mismatch if row.items() >= wanted.items())

    logit_errors = {row["engine"]: row["logit_error"] for row in mismatch if row["kind"] == "logits"}
    return {
        "kl_without": kl("bfloat16", False),
        "kl_with": kl("bfloat16", True),
        "replay_gain": kl("bfloat16", False) / kl("bfloat16", True),
        "kl_without_fp8_trainer": kl("float8", False),
        "kl_with_fp8_trainer": kl("float8", True),
        "weight_bytes_ratio": ratio("weight_mib", "small-moe"),
        "weight_bytes_ratio_tiny": ratio("weight_mib", "tiny-moe, warm"),
        "matrices_bytes_ratio": ratio("matrices_mib", "small-moe"),
        "kv_bytes_ratio": ratio("kv_mib", "small-moe"),
        "kv_bytes_ratio_tiny": ratio("kv_mib", "tiny-moe, warm"),
        "logit_error": logit_errors[BOTH],
        "logit_error_bfloat16": logit_errors["bfloat16"],
    }


# ---- memory ---------------------------------------------------------------------------------------------------------


def preset(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    """A model folder with random weights, in bfloat16."""
    folder.mkdir()
    values = {**PRESETS[name], **(changes or {})}
    (folder / "config.json").write_text(json.dumps(values))
    write_tensors(folder, hf_tensors(build_model(ModelSpec.from_config(values), torch.bfloat16)))
    return folder


def memory_rows(name: str, folder: Path, rss: bool = False) -> list[dict[str, Any]]:
    """Bytes by kind of engine; KV of 64 Ki tokens. `rss`: also the growth of a process's resident memory."""
    rows = []
    for engine, settings in ENGINES.items():
        config = validate(EngineConfig, settings)
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            row = pool.apply(_measure, (folder, config))
        grown = {key: row.pop(key) for key in ("rss_weights_mib", "rss_kv_mib")}
        rows.append({"kind": "memory", "of": name, "engine": engine, **row, **(grown if rss else {})})
    return rows


def _measure(folder: Path, config: EngineConfig) -> dict[str, float]:
    """In a process of its own: what it holds, and by how much it has grown."""
    torch.set_num_threads(1)
    spec, fp8_kv = ModelSpec.from_folder(folder), config.kv_dtype == "float8"
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    torch.ones(64, 64) @ torch.ones(64, 64)  # what torch loads at first use is nobody's
    before = _rss()
    live = LiveWeights(folder, dtype, 0, fp8=config.fp8_scales if config.dtype == "float8" else None)
    loaded = _rss()
    mib = -(-65536 // BLOCK * block_bytes(spec, BLOCK, dtype.itemsize, False, fp8_kv) // MIB)
    cache = KvCache(spec, BLOCK, mib, dtype, False, fp8_kv)
    return {
        "weight_mib": live.resident_bytes / MIB,
        "matrices_mib": matrix_bytes(live.model) / MIB,
        "kv_mib": block_bytes(spec, BLOCK, dtype.itemsize, False, fp8_kv) * (65536 // BLOCK) / MIB,
        "kv_counted_mib": cache.nbytes / cache.num_blocks * (65536 // BLOCK) / MIB,
        "rss_weights_mib": loaded - before,
        "rss_kv_mib": _rss() - loaded,
    }


def matrix_bytes(model: LanguageModel) -> int:
    """Of the matrices of the precision map, in whatever form they are."""
    names = fused_columns(model.names, model.spec)
    held = torch.nn.ParameterList(p for name, p in model.named_parameters() if name in names)
    return resident_bytes(held)


def _rss() -> float:
    """MiB, without file pages: a mapped checkpoint is no memory of ours."""
    gc.collect()
    info = psutil.Process().memory_info()
    return (info.rss - info.shared) / MIB


# ---- mismatch -------------------------------------------------------------------------------------------------------


def mismatch_rows(config: RunConfig, tokens: int) -> Iterator[dict[str, Any]]:
    trainers = {dtype: _trainer(config.model.path, dtype) for dtype in ("bfloat16", "float8")}
    for engine, settings in ENGINES.items():
        if engine == "float32":
            continue
        started = time.perf_counter()
        rows = asyncio.run(sample_rows(config, settings, tokens))
        sampled_s = time.perf_counter() - started
        for trainer, model in trainers.items():
            for replay in (True, False):
                measured = compare(model, rows, replay)
                yield {"kind": "kl", "of": trainer, "engine": engine, "replay": replay, **measured, "sampling_s": sampled_s}
        yield {"kind": "logits", "of": "float32", "engine": engine, **logit_error(config.model.path, settings, rows[:4])}


def _trainer(folder: Path, dtype: str) -> Any:
    """The model that computes in a trainer of this dtype."""
    return Weights(load_model(folder), validate(TrainerConfig, {"dtype": dtype}), in_place=True).compute


@torch.no_grad()
def logit_error(folder: Path, settings: Mapping[str, str], rows: Sequence[MicroBatch]) -> dict[str, float]:
    """Of the engine's model against float32, with the experts of the rows in both. A constant added to a token's logits is no error."""
    engine = EmbeddedEngine(folder, validate(EngineConfig, {**settings, "kv_memory_mib": 4}), 64)._weights.model
    exact, context = load_model(folder), RoundedKv if settings.get("kv_dtype") == "float8" else FullContext
    error = size = largest = 0.0
    for row in rows:
        a_TV, b_TV = (_logits(model, row, kind) for model, kind in ((engine, context), (exact, FullContext)))
        error += float((a_TV - b_TV).square().sum())
        size += float(b_TV.square().sum())
        largest = max(largest, float((a_TV - b_TV).abs().max()))
    return {"logit_error": (error / size) ** 0.5, "logit_max": largest}


def _logits(model: LanguageModel, row: MicroBatch, context: type[FullContext]) -> torch.Tensor:
    assert row.routing_TLK is not None and row.routing_valid_T is not None
    forced_TLK, valid_T = torch.from_numpy(row.routing_TLK.astype("int64")), torch.tensor(row.routing_valid_T)
    seen = context(row.doc_starts_D, forced_ids_TLK=forced_TLK, valid_T=valid_T)
    logits_TV = model.logits(model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), seen)).float()[valid_T]
    return logits_TV - logits_TV.mean(-1, keepdim=True)


if __name__ == "__main__":
    main()
