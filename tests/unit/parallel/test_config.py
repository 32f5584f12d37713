"""What cannot be spread is refused before anything starts, with the reason and what would work."""

from __future__ import annotations

import pytest

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec
from slipstream.parallel.fit import check_fits
from slipstream.parallel.mesh import joined
from tests.unit.trainer.helpers import HF_CONFIG


def config(**values) -> ParallelConfig:
    return validate(ParallelConfig, values)


@pytest.mark.parametrize(
    ("values", "problem", "nearest"),
    [
        ({"processes": 6, "cp": 4}, "6 is no multiple of dp_replicate x cp x pp = 1 x 4 x 1", "dp_replicate = 1, cp = 3, ep = 1"),
        ({"processes": 8, "ep": 3}, "ep = 3 does not divide dp_shard x cp = 8 x 1 = 8", "dp_replicate = 1, cp = 1, ep = 4"),
        ({"processes": 8, "pp": 3}, "8 is no multiple of dp_replicate x cp x pp = 1 x 1 x 3", "cp = 1, ep = 1, pp = 4"),
        ({"processes": 8, "pp": 2, "ep": 8}, "ep = 8 does not divide dp_shard x cp = 4 x 1 = 4", "cp = 1, ep = 8, pp = 1"),
        ({"processes": 8, "dp_replicate": 2, "ep": 8}, "ep = 8 does not divide", "dp_replicate = 1, cp = 1, ep = 8"),
    ],
)
def test_sizes_that_do_not_factor_name_the_nearest_that_do(values, problem, nearest):
    with pytest.raises(ConfigError) as error:
        config(**values)
    assert problem in str(error.value)
    assert f"nearest that fits: processes = {values['processes']}," in str(error.value) and nearest in str(error.value)


def test_what_is_left_over_shards_the_weights():
    assert (config(processes=24, dp_replicate=2, cp=3).dp_shard, config(processes=24, dp_replicate=2, cp=3).fsdp) == (4, 12)
    assert (config(processes=24, cp=3, pp=4).dp_shard, config(processes=24, cp=3, pp=4).fsdp) == (2, 6)


def test_experts_that_cannot_be_shared_out_are_refused():
    spec = ModelSpec.from_config(HF_CONFIG)  # 8 experts, 4 query and 2 key/value heads
    check_fits(config(processes=8, ep=8), spec)
    with pytest.raises(ConfigError, match=r"ep = 3 does not divide the 8 experts.*nearest that fits: processes = 6, .*cp = 1, ep = 2"):
        check_fits(config(processes=6, ep=3), spec)
    dense = {**HF_CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ConfigError, match=r"'qwen3' has none.*ep = 1"):
        check_fits(config(processes=2, ep=2), ModelSpec.from_config(dense))


def test_heads_that_cannot_be_shared_out_are_refused_for_ulysses_only():
    spec = ModelSpec.from_config({**HF_CONFIG, "num_attention_heads": 12, "num_key_value_heads": 3})
    for method in ("all_gather", "ring"):
        check_fits(config(processes=8, cp=8, cp_method=method), spec)
    check_fits(config(processes=6, cp=6, cp_method="ulysses"), spec)  # two copies of each key/value head
    expected = r"cp = {} .*'ulysses'.*does not divide the 12 query and 3 key/value heads.*processes = {}, dp_replicate = 1, cp = {}"
    for cp, nearest in ((4, 1), (8, 1), (9, 9 // 3)):
        with pytest.raises(ConfigError, match=expected.format(cp, cp, nearest)):
            check_fits(config(processes=cp, cp=cp, cp_method="ulysses"), spec)


def test_sparse_attention_goes_with_everything_but_ulysses():
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8}
    index = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 3, "num_key_value_heads": 4}
    spec = ModelSpec.from_config({**HF_CONFIG, **sizes, **index, "model_type": "glm_moe_dsa", "architectures": None})
    for method in ("all_gather", "ring"):
        check_fits(config(processes=2, cp=2, cp_method=method), spec)
    with pytest.raises(ConfigError, match=r"sparse attention of 'glm_moe_dsa'.*cp_method = 'all_gather' or 'ring' can.*cp = 1, ep = 1"):
        check_fits(config(processes=2, cp=2, cp_method="ulysses"), spec)


def test_a_process_that_was_started_alone_says_how_to_start_all(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = r"processes = 2, but this process was started as one of 1.*torchrun --nproc-per-node 2"
    with pytest.raises(ConfigError, match=expected), joined(config(processes=2), 1.0):
        pass
