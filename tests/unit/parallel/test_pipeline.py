"""Where a pipeline cuts the layers, and what each process keeps of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.errors import ConfigError
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec
from slipstream.parallel.fit import check_fits
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.pipeline import keep_stages, own_stages
from slipstream.parallel.stages import layer_work, stages
from tests.dist.cases import MODELS
from tests.unit.trainer.helpers import HF_CONFIG

DSA = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def config(**values) -> ParallelConfig:
    return validate(ParallelConfig, values)


def spec(layers: int, **changes) -> ModelSpec:
    return ModelSpec.from_config({**HF_CONFIG, "tie_word_embeddings": False, "num_hidden_layers": layers, **changes})


def sizes(model: ModelSpec, count: int) -> list[int]:
    return [stage.end - stage.first for stage in stages(model, count)]


@pytest.mark.parametrize("count", range(1, 8))
def test_stages_lie_end_to_end_and_none_is_empty(count):
    found = stages(spec(7), count)
    assert found[0].first == 0 and found[-1].end == 7 and all(a.end == b.first for a, b in pairwise(found))
    assert min(sizes(spec(7), count)) >= 1
    assert [s.number for s in found if s.is_first] == [0] and [s.number for s in found if s.is_last] == [count - 1]


def test_the_head_makes_room_in_the_last_stage():
    layer = layer_work(spec(8), 0)
    assert sizes(spec(8, vocab_size=2), 2) == [4, 4]
    assert sizes(spec(8, vocab_size=2 * layer // 16), 2) == [5, 3]  # as heavy as two layers
    assert sizes(spec(8, vocab_size=6 * layer // 16), 4) == [2, 2, 3, 1]  # early stages hold more rows in flight


def test_layers_weigh_what_a_token_is_multiplied_with():
    dense_first = spec(8, mlp_only_layers=[0, 1, 2, 3], intermediate_size=640, vocab_size=2)  # 20 times the features of two experts
    assert [stage.first for stage in stages(dense_first, 4)] == [0, 1, 2, 3]
    assert layer_work(dense_first, 7) == layer_work(dense_first, 0) - 3 * 16 * (640 - 2 * 16) + 16 * 8
    model = ModelSpec.from_config(MODELS["glm4_moe"])
    assert sum(layer_work(model, layer) for layer in range(5)) + model.end_params == model.num_active_params


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 4}, {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_stages": 2}])
def test_each_parameter_is_kept_by_one_process_under_its_name(sizes):
    model_spec = ModelSpec.from_config(MODELS["glm4_moe"])
    whole, kept = dict(build_model(model_spec, seed=1).named_parameters()), {}
    for rank in range(sizes["pp"]):
        mesh, model = Mesh(config(processes=sizes["pp"], **sizes), rank), build_model(model_spec, seed=1)
        keep_stages(model, mesh)
        own = dict(model.named_parameters())
        assert not kept.keys() & own.keys()
        layers = {layer for stage in own_stages(model_spec, mesh) for layer in range(stage.first, stage.end)}
        assert {int(name.split(".")[1]) for name in own if name.startswith("layers.")} == layers
        assert ("embed" in own) == (rank == 0) and ("head" in own) == ("norm" in own) == (rank == sizes["pp"] - 1)
        kept |= own
    assert kept.keys() == whole.keys() and all(torch.equal(kept[name], whole[name]) for name in whole)


def test_a_schedule_and_the_stages_of_a_process_must_go_together():
    for schedule, number in (("interleaved_1f1b", 1), ("1f1b", 2), ("gpipe", 2)):
        with pytest.raises(ConfigError, match=rf"pp_schedule = '{schedule}' and pp_stages = {number}.*Set pp_stages = 2"):
            config(processes=2, pp=2, pp_schedule=schedule, pp_stages=number)


def test_more_stages_than_layers_are_refused():
    check_fits(config(processes=8, pp=4), spec(4))
    with pytest.raises(ConfigError, match=r"pp = 8 makes 8 parts of the layers, and the model has 4.*nearest that fits: .*pp = 4"):
        check_fits(config(processes=8, pp=8), spec(4))
    interleaved = config(processes=8, pp=4, pp_schedule="interleaved_1f1b", pp_stages=2)
    with pytest.raises(ConfigError, match=r"pp = 4 with pp_stages = 2 makes 8 parts.*pp = 2"):
        check_fits(interleaved, spec(7))
    check_fits(interleaved, spec(8))


def test_tied_embeddings_are_refused():
    with pytest.raises(ConfigError, match=r"pp = 2 keeps embedding and head in different processes, and .* 'qwen3_moe' ties them.*pp = 1"):
        check_fits(config(processes=2, pp=2), ModelSpec.from_config(HF_CONFIG))


def test_a_cut_between_layers_that_share_a_choice_of_tokens_is_refused():
    check_fits(config(processes=2, pp=2), ModelSpec.from_config({**DSA, "indexer_types": ["full", "shared", "full", "shared"]}))
    shared = ModelSpec.from_config({**DSA, "indexer_types": ["full", "shared", "shared", "shared"]})
    with pytest.raises(ConfigError, match=r"pp = 2 cuts the model before layer 2, and layer 2 behind it sees the tokens that layer 0"):
        check_fits(config(processes=2, pp=2), shared)
