"""A KV pool that cannot hold one sequence of the context is refused, with the smallest size that can; and that size works."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from slipstream import cli
from slipstream.config.serve import EngineConfig
from slipstream.engine.kv import KvCache
from slipstream.engine.room import block_bytes, check_room
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec
from tests.unit.engine.helpers import ask, make_engine, prompt, run, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With so many heads that a token takes 12 KiB."""
    return write_model(tmp_path_factory.mktemp("room") / "model", moe=True, num_attention_heads=16, num_key_value_heads=16)


@pytest.mark.parametrize("block_tokens", [1, 4, 7, 100])
@pytest.mark.parametrize("seq_len", [2, 85, 86, 200, 256])
def test_the_smallest_size_is_the_smallest(folder, seq_len, block_tokens):
    spec = ModelSpec.from_folder(folder)

    def holds(mib: int) -> bool:
        try:
            return KvCache(spec, block_tokens, mib, torch.float32, True).num_blocks * block_tokens >= seq_len - 1
        except ConfigError:  # not even two blocks
            return False

    sizes = [mib for mib in range(2, 8) if holds(mib)]
    for mib in range(2, 8):
        config = EngineConfig(kv_memory_mib=mib, block_tokens=block_tokens)
        if mib in sizes:
            check_room(spec, config, seq_len)
            continue
        with pytest.raises(
            ConfigError, match=rf"kv_memory_mib = {mib} and model\.seq_len = {seq_len}: .*kv_memory_mib = {sizes[0]} or more"
        ):
            check_room(spec, config, seq_len)


def test_with_the_smallest_size_the_longest_sequence_runs(folder):
    with pytest.raises(ConfigError) as caught:
        check_room(ModelSpec.from_folder(folder), EngineConfig(kv_memory_mib=1), 256)
    smallest = int(re.search(r"kv_memory_mib = (\d+) or more", str(caught.value))[1])
    engine = make_engine(folder, seq_len=256, kv_memory_mib=smallest, block_tokens=16)
    completion = run(engine, [ask("a", prompt(1, 100), max_tokens=156, stop_token_ids=())])["a"]
    assert completion.finish_reason in ("length", "stop")


def test_an_engine_does_not_start_without_room(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["slipstream", "engine", "--model", str(folder), "--seq-len", "256", "--set", "kv_memory_mib=1"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "use engine.kv_memory_mib = " in capsys.readouterr().err


def test_index_keys_of_sparse_attention_are_part_of_a_block(tmp_path):
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
    index = {"index_n_heads": 2, "index_head_dim": 24, "index_topk": 4, "indexer_types": ["full", "shared", "full"]}
    family = {"model_type": "glm_moe_dsa", "architectures": None, "n_routed_experts": 4}
    spec = ModelSpec.from_folder(write_model(tmp_path / "model", moe=True, **family, **sizes, **index))
    cache = KvCache(spec, 4, 1, torch.float32, False)
    arrays = [*cache.keys, *cache.values, *cache.index_keys.values()]
    assert len(cache.index_keys) == 2
    assert sum(array[0].nbytes for array in arrays) == block_bytes(spec, 4, 4, False)
