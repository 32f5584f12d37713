"""An engine whose cache is in FP8 scores as the model would if its keys and values were rounded, however they got into the cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks._rounded_kv import RoundedKv

from slipstream.config.serve import EngineConfig
from slipstream.engine.kv import KvCache
from slipstream.engine.room import MIB, block_bytes, check_room
from slipstream.errors import ConfigError
from slipstream.models.context import FullContext
from slipstream.models.hf import hf_tensors, write_tensors
from slipstream.models.load import build_model, load_model
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec
from slipstream.types import Completion
from tests.unit.engine.helpers import ask, make_engine, prompt, run

KINDS = {"grouped": "tiny-moe", "windows and sinks": "tiny-gpt-oss", "latent": "tiny-deepseek", "sparse": "tiny-glm-dsa"}


def written(folder: Path, preset: str) -> Path:
    folder.mkdir()
    config = {**PRESETS[preset], "vocab_size": 61, "eos_token_id": 60}
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, hf_tensors(build_model(ModelSpec.from_config(config), seed=1)))
    return folder


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def folder(request, tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("kv") / "model", request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> ModelSpec:
    return ModelSpec.from_config({**PRESETS["tiny-moe"], "vocab_size": 61})


@torch.no_grad()
def gap(folder: Path, prompt_T: np.ndarray, done: Completion, context: type[FullContext]) -> float:
    """Mean |logprob difference| between the engine and a full pass with the engine's experts."""
    model, tokens_T = load_model(folder), np.concatenate([prompt_T, done.tokens_N])
    assert done.routing is not None and done.routing.valid_T.all() and done.routing.start == 0
    ids_TLK = np.pad(done.routing.ids_TLK, ((0, 1), (0, 0), (0, 0)))  # the last token was never processed, and predicts nothing
    seen = context([0, len(tokens_T)], forced_ids_TLK=torch.from_numpy(ids_TLK.astype(np.int64)))
    hidden_TD = model(torch.from_numpy(tokens_T).long(), torch.arange(len(tokens_T)), seen)
    logprobs_TV = model.logits(hidden_TD).log_softmax(-1)[len(prompt_T) - 1 : -1]
    scored_N = logprobs_TV.gather(1, torch.from_numpy(done.tokens_N).long()[:, None]).squeeze(1)
    return float((scored_N - torch.from_numpy(done.logprobs_N)).abs().mean())


def test_it_scores_as_a_model_with_rounded_keys_and_values(folder):
    engine = make_engine(folder, kv_dtype="float8", max_step_tokens=64)
    prompts = {f"r{i}": prompt(i, 20 + 17 * i) for i in range(4)}  # longer than a window and than what sparse attention chooses
    done = run(engine, [ask(name, tokens, stop_token_ids=()) for name, tokens in prompts.items()])
    for name, completion in done.items():
        rounded, exact = (gap(folder, prompts[name], completion, context) for context in (RoundedKv, FullContext))
        assert rounded < 0.1 * exact and 1e-4 < exact < 0.2, (rounded, exact)


def same(a: dict[str, Completion], b: dict[str, Completion]) -> None:
    """But for the last bits of what torch adds up in another order when another batch is around."""
    assert a.keys() == b.keys()
    for name, one in a.items():
        other = b[name]
        assert one.tokens_N.tolist() == other.tokens_N.tolist()
        assert one.logprobs_N == pytest.approx(other.logprobs_N, abs=1e-5)
        assert one.routing is not None and other.routing is not None
        assert np.array_equal(one.routing.ids_TLK, other.routing.ids_TLK) and one.routing.valid_T.all()


def test_a_prefix_that_is_found_equals_one_that_is_computed(folder):
    shared = prompt(0, 41)
    asked = [ask(f"r{i}", np.concatenate([shared, prompt(i + 1, 9)]), seed=i, temperature=1.0) for i in range(3)]
    computed = {}
    for request in asked:
        computed |= run(make_engine(folder, kv_dtype="float8"), [request])
    engine = make_engine(folder, kv_dtype="float8")
    found = run(engine, asked[:1]) | run(engine, asked[1:])
    assert sum(completion.cached_tokens for completion in found.values()) == 2 * 40
    same(computed, found)


def test_preempted_sequences_are_computed_again_to_the_same_values(tmp_path):
    folder = written(tmp_path / "model", "tiny-deepseek")
    asked = [ask(f"r{i}", prompt(i, 30), max_tokens=60, temperature=1.0, seed=i, stop_token_ids=()) for i in range(28)]
    small, large = (make_engine(folder, kv_dtype="float8", prefix_cache=False, kv_memory_mib=mib) for mib in (1, 8))
    crowded, roomy = run(small, asked), run(large, asked)
    assert small.preemptions > 0 == large.preemptions
    same(crowded, roomy)


def test_the_fused_step_leaves_such_a_cache_alone(tmp_path):
    folder = written(tmp_path / "model", "tiny-moe")
    engines = [make_engine(folder), make_engine(folder, kv_dtype="float8")]
    for engine in engines:
        run(engine, [ask("a", prompt(1, 9))])
    assert [engine._runner._fused is None for engine in engines] == [False, True]


@pytest.mark.parametrize("preset", KINDS.values())
@pytest.mark.parametrize("fp8", [False, True])
def test_a_block_takes_the_bytes_that_its_parts_take(preset, fp8):
    spec = ModelSpec.from_config({**PRESETS[preset], "vocab_size": 61})
    cache = KvCache(spec, 4, 1, torch.bfloat16, True, fp8)
    arrays = [array for layer in range(spec.num_layers) for array in cache.parts(layer)]
    size = block_bytes(spec, 4, 2, True, fp8)
    assert all(len(array) == cache.num_blocks for array in arrays)
    assert sum(array[0].nbytes for array in arrays) + cache.routing[:4].nbytes == size
    assert 0 <= MIB - cache.num_blocks * size < size
    assert cache.nbytes == cache.num_blocks * (size + 4)
    assert len(cache.parts(0)) == (4 if fp8 else 2) + (0 in cache.index_keys)


def test_about_twice_as_many_tokens_fit(tiny):
    counts = [KvCache(tiny, 16, 4, torch.bfloat16, False, fp8).num_blocks for fp8 in (False, True)]
    assert counts[1] / counts[0] == pytest.approx(2 * 16 / 17, rel=0.01)


def test_room_is_checked_with_the_size_of_the_cache(tiny):
    config = EngineConfig(dtype="bfloat16", kv_memory_mib=1, block_tokens=16)
    with pytest.raises(ConfigError, match=r"kv_memory_mib = 1 and model\.seq_len = 3000"):
        check_room(tiny, config, 3000)
    check_room(tiny, config.replace(kv_dtype="float8"), 3000)
    check_room(tiny, config.replace(dtype="float32", kv_dtype="float8"), 3000)
