"""config.json to ModelSpec: what is read, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ModelError
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GLM: dict[str, Any] = {
    **LLAMA,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MLA: dict[str, Any] = {
    **GLM,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DSA: dict[str, Any] = {
    **MLA,
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
}
GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
"""The shape of GLM-5."""
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""config.json of gpt-oss-120b, without what does not change the shape (and without the quantisation, which is refused)."""
YARN: dict[str, Any] = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}


def test_it_imports_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import slipstream.models.spec"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_absent_options_take_the_defaults_of_the_family() -> None:
    spec = ModelSpec.from_config(LLAMA)
    assert (spec.num_kv_heads, spec.head_dim, spec.rope_theta, spec.rms_eps) == (4, 8, 10000.0, 1e-6)
    assert (spec.qk_norm, spec.qkv_bias, spec.out_bias, spec.tie_embeddings, spec.moe_layers) == (False, False, False, False, ())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0, 1, 2)),
        ({"mlp_only_layers": [1]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 1, 2]}, ()),
    ],
)
def test_moe_layers_follow_the_two_options(options: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert ModelSpec.from_config({**MOE, **options}).moe_layers == expected


def test_both_spellings_of_the_expert_count_are_read() -> None:
    renamed = {**MOE, "num_local_experts": MOE["num_experts"]}
    del renamed["num_experts"]
    assert ModelSpec.from_config(renamed) == ModelSpec.from_config(MOE)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_every_form_of_the_plain_rope_options_is_read(options: dict[str, Any]) -> None:
    assert ModelSpec.from_config({**LLAMA, **options}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
        ({"model_type": None}, "model_type = None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size = -1"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"eos_token_id": "2"}, "eos_token_id = '2'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=r"here\.json") as caught:
        ModelSpec.from_config({**LLAMA, **options}, "here.json")
    assert named in str(caught.value)


def test_more_chosen_experts_than_experts_are_refused() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok = 7"):
        ModelSpec.from_config({**MOE, "num_experts_per_tok": 7})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_group": 3}, "n_group = 3 does not cut 8 experts"),
        ({"n_group": 8}, "n_group = 8 does not cut 8 experts"),
        ({"n_group": 2, "topk_group": 3}, "topk_group = 3 is more than n_group = 2"),
        ({"topk_group": 2}, "topk_group = 2 is more than n_group = 1"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "topk_group = 1 groups hold 2 experts"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"partial_rotary_factor": 0.4}, "rotates 3"),
        ({"partial_rotary_factor": 0.01}, "rotates 0"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor = -1"),
        ({"n_shared_experts": -1}, "n_shared_experts = -1"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_what_the_glm_router_cannot_do_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({**GLM, **options})
    assert named in str(caught.value)


def test_glm_options_are_read_in_either_spelling_and_default_as_published() -> None:
    spec = ModelSpec.from_config(GLM)
    assert (spec.rotary_dim, spec.head_dim, spec.moe_layers, spec.shared_intermediate) == (4, 8, (1, 2), 24)
    assert (spec.norm_top_k, spec.gate_scale, spec.num_groups, spec.prediction_layers) == (True, 1.0, 1, 0)
    older = {**GLM, "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    newer = {**GLM, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_type": "default"}}
    assert ModelSpec.from_config(older) == ModelSpec.from_config(newer)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"qk_rope_head_dim": 7}, "rotary"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'default' and 'yarn'"),
        ({"rope_scaling": {**YARN, "factor": None}}, "factor is missing"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ],
)
def test_what_latent_attention_cannot_do_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({**MLA, **options})
    assert named in str(caught.value)


def test_both_forms_of_yarn_are_read_and_scores_gain_what_deepseek_gives_them() -> None:
    older = ModelSpec.from_config({**MLA, "rope_theta": 5e4, "rope_scaling": YARN})
    newer = {key: value for key, value in YARN.items() if key != "type"} | {"rope_type": "yarn", "rope_theta": 5e4}
    assert ModelSpec.from_config({**MLA, "rope_parameters": newer}) == older
    assert older.yarn is not None and older.yarn.table_scale == 1.0
    assert older.latent is not None and older.latent.score_gain == pytest.approx((0.1 * 3.6888794541139363 + 1) ** 2)


def test_end_ids_come_from_the_generation_config_where_it_has_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 3, "torch_dtype": "bfloat16"}))
    assert ModelSpec.from_folder(tmp_path).eos_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    spec = ModelSpec.from_folder(tmp_path)
    assert (spec.eos_ids, spec.dtype) == ((5, 6), "bfloat16")


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected an object"):
        ModelSpec.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        MOE,
        {**MOE, "mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True},
        {**GLM, "attention_bias": True, "n_shared_experts": 2, "use_qk_norm": True, "num_nextn_predict_layers": 1},
        MLA,
        {**MLA, "attention_bias": True, "q_lora_rank": None},
        {**MOE, "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 6},
        {**GPT_OSS, "num_hidden_layers": 3, "layer_types": None},
        {**GPT_OSS, "num_hidden_layers": 3, "layer_types": None, "attention_bias": False},
        {**DSA, "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
        {**DSA, "indexer_types": ["full", "shared", "full"]},
    ],
    ids=["llama", "moe", "mixed", "glm", "mla", "mla-whole-queries", "minimax", "gpt-oss", "gpt-oss-without-bias", "dsa", "dsa-shared"],
)
def test_the_parameter_count_is_that_of_the_built_model(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(config)
    assert spec.num_params == sum(p.numel() for p in build_model(spec, device="meta").parameters())
    biases = (2 * spec.expert_intermediate + spec.hidden) * (spec.clamped is not None)
    unused = (3 * spec.hidden * spec.expert_intermediate + biases) * (spec.num_experts - spec.top_k) * len(spec.moe_layers)
    assert spec.num_params - spec.num_active_params == unused


def test_the_sizes_of_published_models_come_out_as_published() -> None:
    """config.json of SmolLM2-135M and of Qwen3-30B-A3B; parameter counts as their safetensors indices state them."""
    smol = ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 49152,
        }
    )
    assert smol.num_params == smol.num_active_params == 134_515_008
    qwen = ModelSpec.from_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
    )
    assert qwen.num_params == 30_532_122_624
    assert 3.3e9 < qwen.num_active_params < 3.4e9


def test_the_size_of_glm_4_5_air_is_as_published() -> None:
    """106 billion parameters, 12 of them active (GLM-4.5 report, table 1; there without the embedding); no prediction layer."""
    air = ModelSpec.from_config(
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338],
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "model_type": "glm4_moe",
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_qk_norm": False,
            "vocab_size": 151552,
        }
    )
    assert 106e9 < air.num_params < 107e9
    assert 12e9 < air.num_active_params - air.vocab_size * air.hidden < 13e9


def test_the_size_of_deepseek_v3_is_as_published() -> None:
    """671 billion parameters, 37 of them active (DeepSeek-V3 report, abstract), without the prediction layer."""
    spec = ModelSpec.from_config(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "attention_bias": False,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "v_head_dim": 128,
            "vocab_size": 129280,
        }
    )
    assert 670.9e9 < spec.num_params < 671.1e9
    assert 36.5e9 < spec.num_active_params < 37.6e9


MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
"""config.json of MiniMax-M2, without what does not change the shape."""


def test_the_size_of_minimax_m2_is_as_published() -> None:
    """230 billion parameters, 10 of them active (model card)."""
    spec = ModelSpec.from_config(MINIMAX)
    assert 228.5e9 < spec.num_params < 230.5e9
    assert 9.8e9 < spec.num_active_params < 11.2e9
    assert (spec.rotary_dim, spec.rope_theta, spec.prediction_layers) == (64, 5e6, 0)
    assert ModelSpec.from_config({**MINIMAX, "rope_theta": None, "num_mtp_modules": 3}) == replace(spec, prediction_layers=3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"use_routing_bias": False}, "use_routing_bias = False"),
        ({"use_qk_norm": False}, "use_qk_norm = False"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ({"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({"rotary_dim": 256}, "partial_rotary_factor = 2.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "how to convert"),
    ],
)
def test_what_minimax_cannot_do_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({**MINIMAX, **options})
    assert named in str(caught.value)


def test_the_size_of_gpt_oss_120b_is_as_published() -> None:
    """116.8 billion parameters, 5.1 of them active (model card, table 1; the active ones without the embedding, with the head)."""
    spec = ModelSpec.from_config(GPT_OSS)
    assert 116.7e9 < spec.num_params < 116.9e9
    assert 5.0e9 < spec.num_active_params - spec.vocab_size * spec.hidden < 5.2e9
    assert (spec.window, spec.window_layers) == (128, tuple(range(0, 36, 2)))
    left_out = ("layer_types", "attention_bias", "rms_norm_eps", "rope_theta", "sliding_window", "swiglu_limit", "num_experts_per_tok")
    assert ModelSpec.from_config({**GPT_OSS, **dict.fromkeys(left_out)}) == spec


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rope_scaling": None}, "rope_scaling (or rope_parameters) is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected num_hidden_layers = 36"),
        ({"layer_types": ["chunked_attention"] * 36}, "'full_attention' or 'sliding_attention' in every layer"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit = -1.0"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "how to convert"),
    ],
)
def test_what_gpt_oss_cannot_do_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({**GPT_OSS, **options})
    assert named in str(caught.value)


def test_the_sizes_of_glm_5_are_as_published() -> None:
    """744 billion parameters, 40 of them active (GLM-5 report, without the embedding); of GLM-5.2 only 21 of 78 layers have an indexer."""
    five = ModelSpec.from_config(GLM_5)
    assert 743.8e9 < five.num_params < 744.0e9
    assert 40e9 < five.num_active_params - five.vocab_size * five.hidden < 41e9
    assert five.index_layers == tuple(range(78))
    shared = ModelSpec.from_config({**GLM_5, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert shared.index_layers == (0, 1, 2, *range(6, 78, 4)) and len(shared.index_layers) == 21
    assert shared.indexer is not None and shared.indexer.sources[:12] == (0, 1, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10)
    assert 743.3e9 < shared.num_params < 743.5e9


def test_every_way_of_saying_which_layers_share_is_read() -> None:
    named = ModelSpec.from_config({**DSA, "indexer_types": ["full", "shared", "full"]})
    assert named.indexer is not None and named.indexer.sources == (0, 0, 2)
    for other in ({"index_topk_pattern": "FSF"}, {"index_topk_freq": 2, "index_skip_topk_offset": 1}):
        assert ModelSpec.from_config({**DSA, **other}) == named
    assert ModelSpec.from_config({**DSA, "mlp_layer_types": ["sparse", "dense", "sparse"]}).moe_layers == (0, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "the first 'full'"),
        ({"indexer_types": ["full"]}, "expected 3 of"),
        ({"index_topk_pattern": "FXF"}, "'X'"),
        ({"index_topk": 0}, "index_topk = 0"),
        ({"index_n_heads": None}, "index_n_heads is missing"),
        ({"index_head_dim": 4}, "index_head_dim = 4 is less than qk_rope_head_dim = 8"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
        ({"layer_types": ["full_attention"] * 3}, "'indexed_attention' in every layer"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "how to convert"),
    ],
)
def test_what_sparse_attention_cannot_do_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({**DSA, **options})
    assert named in str(caught.value)
