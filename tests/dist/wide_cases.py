"""What the ranks of an engine group and the tests both know: models, requests, and how to run one engine, alone or in step with others."""

from __future__ import annotations

import json
import select
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from slipstream.config.serve import EngineConfig
from slipstream.config.speculation import PromptLookup
from slipstream.config.tiers import TiersConfig
from slipstream.config.wide import WideConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.models import hf
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec
from slipstream.types import Completion, GenerateRequest, Sampling
from tests.dist.cases import MODELS

WORLD = 4
SEQ_LEN = 96
NUM_REQUESTS = 9
QWEN = {**MODELS["qwen3_moe"], "num_hidden_layers": 3, "mlp_only_layers": [0], "hidden_size": 32, "vocab_size": 61, "eos_token_id": 60}
UNEVEN = {**QWEN, "num_experts": 10}
"""Ten experts on four ranks: two places are left over, for copies."""
BIASED = {**MODELS["glm4_moe"], "hidden_size": 32, "vocab_size": 61, "eos_token_id": 60, "n_routed_experts": 16}
SERVED = {"qwen3_moe": QWEN, "uneven": UNEVEN, "glm4_moe": MODELS["glm4_moe"], "gpt_oss": MODELS["gpt_oss"]}
HOT = (5, 11)
"""Experts that the router bias of the skewed model prefers."""


def write(folder: Path, config: dict, seed: int = 1, hot: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    model = build_model(ModelSpec.from_folder(folder), seed=seed)
    for name, parameter in model.named_parameters():
        if hot and name.endswith("router_bias"):
            parameter.data[list(HOT)] = hot
    hf.write_tensors(folder, hf.hf_tensors(model))
    return folder


def write_all(folder: Path) -> None:
    for name, config in SERVED.items():
        write(folder / name, config)
    write(folder / "next", QWEN, seed=2)
    write(folder / "skewed", BIASED, hot=0.3)


def settings(dtype: str = "float32", prefix_cache: bool = True, **ep) -> EngineConfig:
    wide = WideConfig(**{"ranks": WORLD, "rebalance_steps": 0, "timeout_s": 120.0, **ep})
    small = {"block_tokens": 4, "kv_memory_mib": 1, "max_running": 16, "max_step_tokens": 24}
    return EngineConfig(replicas=wide.ranks, ep=wide, dtype=dtype, prefix_cache=prefix_cache, **small)  # type: ignore[arg-type]


ALL_AT_ONCE = {"speculation": PromptLookup(overhead_tokens=1e9), "tiers": TiersConfig(ram_mib=2, min_tokens=4), "kv_dtype": "float8"}
"""Guesses wherever something matches, RAM behind a device that is too small, and keys and values in FP8."""


def repeating(rank: int) -> list[GenerateRequest]:
    """Prompts that repeat themselves, greedy, the same ones twice: what the first time left on the device is gone by then."""
    phrases = [np.tile(np.random.default_rng(10 * rank + i).integers(0, 49, 5).astype(np.int32), 6) for i in range(4)]
    sampling = Sampling(temperature=0.0, max_tokens=24)
    return [GenerateRequest(f"r{rank}/{i}/{turn}", phrases[i], sampling) for turn in range(2) for i in range(4)]


def one_by_one(engine: EmbeddedEngine, rank: int) -> dict[str, Completion]:
    """With a device of 20 blocks where there are tiers."""
    if engine.tiers is not None:
        engine._scheduler.pool._free = [block for block in engine._scheduler.pool._free if block < 20]
        engine._scheduler.pool.num_blocks = 20
    return {name: c for one in repeating(rank) for name, c in run(engine, [one]).items()}


def request(number: int, vocab: int = 50, tokens: int = 12, temperature: float = 1.0) -> GenerateRequest:
    prompt_T = np.random.default_rng(number).integers(0, vocab - 1, 5 + 4 * number).astype(np.int32)
    return GenerateRequest(f"r{number}", prompt_T, Sampling(temperature=temperature, max_tokens=tokens, seed=number))


def requests(rank: int | None = None) -> list[GenerateRequest]:
    """Of one rank, or all. The last rank has none: it only serves experts."""
    return [request(number) for number in range(NUM_REQUESTS) if rank is None or number % (WORLD - 1) == rank]


def run(engine: EmbeddedEngine, asked: list[GenerateRequest], each_step: Callable[[], None] = lambda: None) -> dict[str, Completion]:
    """Until everything that was asked, of any rank, has ended."""
    for one in asked:
        engine.add(one)
    bell = getattr(engine, "bell", None)
    while not asked and bell is not None and not engine.heard():  # type: ignore[attr-defined]
        assert select.select([bell], [], [], 120)[0], "nobody rang"
    done = {}
    while engine.has_work:
        done |= {completion.id: completion for completion in engine.step().finished}
        engine.check_integrity()
        each_step()
    return done


def plain(done: dict[str, Completion]) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, logprobs, routing rows) by request."""
    found = {}
    for name, completion in done.items():
        assert completion.routing is not None and completion.routing.valid_T.all()
        rows = torch.from_numpy(completion.routing.ids_TLK.astype(np.int64))
        found[name] = torch.from_numpy(completion.tokens_N.copy()), torch.from_numpy(completion.logprobs_N.copy()), rows
    return found
