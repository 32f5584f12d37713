"""What each family's `config.json` says, as fields of `ModelSpec`: one reader a family, every value checked.

Torch-free. An option of the published architecture that is not implemented here for its family (scaled rotary positions, another
activation) is refused by name, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.config_reader import Reader, off
from slipstream.models.parts import ClampedGlu, Indexer, Latent, Yarn


def read_options(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of `ModelSpec`, not yet checked against one another. `source` names the config in errors.

    Raises ModelError: an unknown family, a key that is missing or of the wrong kind, an option that is not implemented.
    """
    reader = Reader(config, source)
    family = config.get("model_type")
    if family not in _FAMILIES:
        supported = ", ".join(_FAMILIES)
        raise ModelError(
            f"{source}: model_type = {family!r} is not supported; slipstream implements {supported}. Others may run, slower, through "
            'transformers\' own modules: set model.impl = "hf" in the run file, or --impl hf for `slipstream engine` and `generate`'
        )
    known = _FAMILIES[family]
    reader.refuse_unless("architectures", lambda names: names is None or known.architecture in names, f"[{known.architecture!r}]")
    kinds = " or ".join(repr(kind) for kind in known.layer_kinds)
    reader.refuse_unless("layer_types", lambda given: given is None or set(given) <= {*known.layer_kinds}, f"{kinds} in every layer")
    for key, implemented, accepts in _IMPLEMENTED:
        reader.refuse_unless(key, accepts, implemented)
    reader.refuse_quantised()
    return {"family": family, **_common_fields(reader), **known.fields(reader)}


_IMPLEMENTED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("hidden_act", "'silu'", lambda value: value in (None, "silu")),
    ("use_sliding_window", "false", off),
    ("attention_dropout", "0", off),
    ("mlp_bias", "false", off),
    ("rope_interleaved", "false", off),
)
"""Options that change the numbers: key, what is implemented, and whether a value means that. A key that is absent is None."""


def _common_fields(reader: Reader) -> dict[str, Any]:
    heads = reader.number("num_attention_heads")
    dtype = reader.config.get("dtype") or reader.config.get("torch_dtype") or "float32"
    return {
        "vocab_size": reader.number("vocab_size"),
        "hidden": reader.number("hidden_size"),
        "intermediate": reader.number("intermediate_size"),
        "num_layers": reader.number("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": reader.number("num_key_value_heads", default=heads),
        "max_positions": reader.number("max_position_embeddings"),
        "rms_eps": reader.real(reader.first("rms_norm_eps", default=1e-6), "rms_norm_eps"),
        "tie_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": reader.flag("attention_bias"),
        "eos_ids": reader.integers("eos_token_id"),
        "dtype": str(dtype),
    }


def _rope(reader: Reader, partial: float | None = None, theta: float = 10000.0) -> dict[str, Any]:
    """Of families without scaled positions.

    `partial`: share of a head that is rotated where the config does not say; None: the family rotates whole heads. `theta` likewise.
    """
    _, options = _rope_options(reader, ("default",))
    theta = options.get("rope_theta", reader.first("rope_theta", default=theta))
    factor = options.get("partial_rotary_factor", reader.first("partial_rotary_factor", default=partial or 1.0))
    if (partial is None and factor != 1) or reader.real(factor, "partial_rotary_factor") > 1:
        family, implemented = reader.config["model_type"], "1" if partial is None else "above 0 and at most 1"
        raise ModelError(f"{reader.source}: partial_rotary_factor = {factor!r} is not supported; of {family} it must be {implemented}")
    return {"rope_theta": reader.real(theta, "rope_theta"), "rotary_factor": float(factor)}


def _rope_options(reader: Reader, kinds: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """(kind, options). transformers 5 writes `rope_parameters`; before, `rope_theta` and others stood beside `rope_scaling`."""
    kind, options = "default", {}
    for key in ("rope_scaling", "rope_parameters"):
        given = reader.config.get(key)
        if not given:
            continue
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in kinds or any(isinstance(value, dict) for value in given.values()):
            implemented = " and ".join(repr(kind) for kind in kinds)
            raise ModelError(
                f"{reader.source}: {key} = {json.dumps(given)} is not supported; of this family slipstream implements rope_type "
                f"{implemented}"
            )
        options |= given
    return kind, options


_YARN_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_YARN_KEYS |= {"attention_factor", "rope_theta", "rope_type", "type", "partial_rotary_factor"}


def _yarn(reader: Reader, options: Mapping[str, Any]) -> tuple[Yarn, float]:
    """(how positions are stretched, what scores gain)."""
    unknown = sorted(set(options) - _YARN_KEYS)
    if unknown or options.get("partial_rotary_factor", 1) != 1:
        raise ModelError(f"{reader.source}: YaRN with {', '.join(unknown or ['partial_rotary_factor'])} is not supported")

    def real(key: str, default: float | None = None) -> float:
        value = default if options.get(key) is None else options[key]
        if value is None:
            raise ModelError(f"{reader.source}: {key} is missing; it is required for rope_type 'yarn'")
        return reader.real(value, key)

    factor, wanted, all_dim = real("factor"), options.get("mscale") or 0.0, options.get("mscale_all_dim") or 0.0
    scale = _yarn_scale(factor, wanted) / _yarn_scale(factor, all_dim) if wanted and all_dim else _yarn_scale(factor, 1.0)
    original, fast, slow = int(real("original_max_position_embeddings")), real("beta_fast", 32.0), real("beta_slow", 1.0)
    yarn = Yarn(factor, original, fast, slow, options.get("truncate") is not False, real("attention_factor", scale))
    return yarn, _yarn_scale(factor, all_dim) ** 2 if all_dim else 1.0


def _yarn_scale(factor: float, weight: float) -> float:
    """Peng et al., "YaRN", 2023, equation 22, with the weight that DeepSeek-V2 gave it."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama(reader: Reader) -> dict[str, Any]:
    return {"head_dim": reader.number("head_dim", default=_even_share(reader)), "out_bias": reader.flag("attention_bias"), **_rope(reader)}


def _qwen3(reader: Reader) -> dict[str, Any]:
    return {"head_dim": reader.number("head_dim"), "qk_norm": True, "out_bias": reader.flag("attention_bias"), **_rope(reader)}


def _qwen3_moe(reader: Reader) -> dict[str, Any]:
    num_layers, step = reader.number("num_hidden_layers"), reader.number("decoder_sparse_step", default=1)
    dense = set(reader.integers("mlp_only_layers"))
    return {
        **_rope(reader),
        "head_dim": reader.number("head_dim", default=_even_share(reader)),
        "qk_norm": True,
        "out_bias": reader.flag("attention_bias"),
        "moe_layers": tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        "num_experts": reader.number("num_experts", "num_local_experts"),
        "top_k": reader.number("num_experts_per_tok"),
        "expert_intermediate": reader.number("moe_intermediate_size"),
        "norm_top_k": reader.flag("norm_topk_prob"),
    }


def _glm4_moe(reader: Reader) -> dict[str, Any]:
    return {
        **_rope(reader, partial=0.5),
        **_grouped_sigmoid_moe(reader),
        "head_dim": reader.number("head_dim", default=_even_share(reader)),
        "qk_norm": reader.flag("use_qk_norm"),
    }


def _minimax_m2(reader: Reader) -> dict[str, Any]:
    for key, implemented, accepts in _MINIMAX_IMPLEMENTED:
        reader.refuse_unless(key, accepts, implemented)
    head_dim = reader.number("head_dim", default=_even_share(reader))
    return {
        **_rope(reader, partial=reader.number("rotary_dim", default=head_dim) / head_dim, theta=5e6),
        "head_dim": head_dim,
        "qk_norm": True,
        "qk_norm_joint": True,
        "moe_layers": tuple(range(reader.number("num_hidden_layers"))),
        "num_experts": reader.number("num_local_experts", "num_experts"),
        "top_k": reader.number("num_experts_per_tok"),
        "expert_intermediate": reader.number("intermediate_size"),
        "router_score": "sigmoid",
        "router_bias": True,
        "norm_top_k": True,
        "prediction_layers": reader.count("num_mtp_modules"),
    }


_MINIMAX_IMPLEMENTED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("scoring_func", "'sigmoid'", lambda kind: kind in (None, "sigmoid")),
    ("use_routing_bias", "true", lambda value: value in (None, True)),
    ("use_qk_norm", "true", lambda value: value in (None, True)),
    ("qk_norm_type", "'per_layer'", lambda kind: kind in (None, "per_layer")),
    ("attn_type_list", "1 (full attention) in every layer", lambda kinds: kinds is None or set(kinds) <= {1}),
    ("attention_bias", "false", off),
    ("shared_intermediate_size", "0", off),
    ("router_jitter_noise", "0", off),
)


def _gpt_oss(reader: Reader) -> dict[str, Any]:
    kind, options = _rope_options(reader, ("default", "yarn"))
    if not options:
        raise ModelError(f"{reader.source}: rope_scaling (or rope_parameters) is missing; it is required for model_type 'gpt_oss'")
    num_layers = reader.number("num_hidden_layers")
    kinds = reader.first("layer_types", default=[("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)])
    if len(kinds) != num_layers:
        raise ModelError(f"{reader.source}: layer_types has {len(kinds)} entries; expected num_hidden_layers = {num_layers}")
    alpha, limit = reader.first("swiglu_alpha", default=1.702), reader.first("swiglu_limit", default=7.0)
    return {
        "rope_theta": reader.real(options.get("rope_theta", reader.first("rope_theta", default=150000.0)), "rope_theta"),
        "yarn": _yarn(reader, options)[0] if kind == "yarn" else None,
        "rms_eps": reader.real(reader.first("rms_norm_eps", default=1e-5), "rms_norm_eps"),
        "head_dim": reader.number("head_dim", default=64),
        "qkv_bias": reader.flag("attention_bias", default=True),
        "out_bias": reader.flag("attention_bias", default=True),
        "sinks": True,
        "window": reader.number("sliding_window", default=128),
        "window_layers": tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention"),
        "moe_layers": tuple(range(num_layers)),
        "num_experts": reader.number("num_local_experts", "num_experts"),
        "top_k": reader.number("num_experts_per_tok", "experts_per_token"),
        "expert_intermediate": reader.number("intermediate_size"),
        "clamped": ClampedGlu(alpha=reader.real(alpha, "swiglu_alpha"), limit=reader.real(limit, "swiglu_limit")),
        "router_logit_bias": True,
        "norm_top_k": True,
    }


def _deepseek_v3(reader: Reader, groups: int = 8, top_groups: int = 4) -> dict[str, Any]:
    kind, options = _rope_options(reader, ("default", "yarn"))
    yarn, gain = _yarn(reader, options) if kind == "yarn" else (None, 1.0)
    heads = reader.number("num_attention_heads")
    reader.refuse_unless("num_key_value_heads", lambda count: count in (None, heads), f"num_attention_heads = {heads}")
    latent = Latent(
        q_rank=reader.count("q_lora_rank"),
        kv_rank=reader.number("kv_lora_rank"),
        nope_dim=reader.number("qk_nope_head_dim"),
        rope_dim=reader.number("qk_rope_head_dim"),
        v_dim=reader.number("v_head_dim"),
        interleaved=reader.flag("rope_interleave", default=True),
        score_gain=gain,
    )
    return {
        **_grouped_sigmoid_moe(reader, dense=3, groups=groups, top_groups=top_groups, scale=2.5),
        "rope_theta": reader.real(options.get("rope_theta", reader.first("rope_theta", default=10000.0)), "rope_theta"),
        "head_dim": max(latent.nope_dim + latent.rope_dim, latent.v_dim),
        "num_kv_heads": heads,
        "out_bias": reader.flag("attention_bias"),
        "latent": latent,
        "yarn": yarn,
    }


def _deepseek_v32(reader: Reader) -> dict[str, Any]:
    every_layer = tuple(range(reader.number("num_hidden_layers")))
    return {**_deepseek_v3(reader), **_sparse(reader, every_layer, interleaved=False)}


def _glm_moe_dsa(reader: Reader) -> dict[str, Any]:
    return {
        **_deepseek_v3(reader, groups=1, top_groups=1),
        **_sparse(reader, _index_sources(reader), interleaved=True),
        "rms_eps": reader.real(reader.first("rms_norm_eps", default=1e-5), "rms_norm_eps"),
    }


def _sparse(reader: Reader, sources: tuple[int, ...], interleaved: bool) -> dict[str, Any]:
    """Of families with sparse latent attention. Their rotation is no option; `interleaved` is that of the indexer."""
    reader.refuse_unless("rope_interleave", lambda value: value in (None, True), "true")
    reader.refuse_unless("indexer_rope_interleave", lambda value: value in (None, interleaved), str(interleaved).lower())
    reader.number("q_lora_rank")
    fields: dict[str, Any] = {
        "indexer": Indexer(
            heads=reader.number("index_n_heads"),
            head_dim=reader.number("index_head_dim"),
            top_k=reader.number("index_topk"),
            interleaved=interleaved,
            sources=sources,
        )
    }
    kinds = reader.first("mlp_layer_types", default=None)
    if kinds is not None:
        reader.refuse_unless("mlp_layer_types", lambda given: len(given) == len(sources) and {*given} <= {"dense", "sparse"}, _LAYER_LIST)
        fields["moe_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    return fields


_LAYER_LIST = "one of 'dense' and 'sparse' a layer"


def _index_sources(reader: Reader) -> tuple[int, ...]:
    """Of each layer, the layer whose indexer chooses: the last one that is "full"."""
    num_layers, freq = reader.number("num_hidden_layers"), max(1, reader.count("index_topk_freq", default=1))
    offset = reader.count("index_skip_topk_offset", default=2)
    scheduled = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)]
    kinds = [_INDEXER_KINDS.get(kind, kind) for kind in reader.first("indexer_types", "index_topk_pattern", default=scheduled)]
    if len(kinds) != num_layers or not {*kinds} <= {"full", "shared"} or kinds[0] != "full":
        raise ModelError(
            f"{reader.source}: indexers of the layers: {kinds}; expected {num_layers} of 'full' and 'shared', the first 'full'"
        )
    sources: list[int] = []
    for i, kind in enumerate(kinds):
        sources.append(i if kind == "full" else sources[-1])
    return tuple(sources)


_INDEXER_KINDS = {"F": "full", "S": "shared"}


def _grouped_sigmoid_moe(reader: Reader, dense: int = 1, groups: int = 1, top_groups: int = 1, scale: float = 1.0) -> dict[str, Any]:
    """The mixture of experts of DeepSeek-V3 and those that took it over; keys are theirs, defaults the family's."""
    reader.refuse_unless("scoring_func", lambda kind: kind in (None, "sigmoid"), "'sigmoid'")
    reader.refuse_unless("topk_method", lambda kind: kind in (None, "noaux_tc"), "'noaux_tc'")
    reader.refuse_unless("moe_layer_freq", lambda every: every in (None, 1), "1")
    inner = reader.number("moe_intermediate_size")
    return {
        "moe_layers": tuple(range(reader.count("first_k_dense_replace", default=dense), reader.number("num_hidden_layers"))),
        "num_experts": reader.number("n_routed_experts", "num_local_experts"),
        "top_k": reader.number("num_experts_per_tok"),
        "expert_intermediate": inner,
        "shared_intermediate": inner * reader.count("n_shared_experts", default=1),
        "router_score": "sigmoid",
        "router_bias": True,
        "num_groups": reader.number("n_group", default=groups),
        "top_groups": reader.number("topk_group", default=top_groups),
        "norm_top_k": reader.flag("norm_topk_prob", default=True),
        "gate_scale": reader.real(reader.first("routed_scaling_factor", default=scale), "routed_scaling_factor"),
        "prediction_layers": reader.count("num_nextn_predict_layers", "num_mtp_layers"),
    }


def _even_share(reader: Reader) -> int:
    return max(1, reader.number("hidden_size") // reader.number("num_attention_heads"))


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    """As `architectures` of config.json names it."""
    fields: Callable[[Reader], dict[str, Any]]
    layer_kinds: tuple[str, ...] = ("full_attention",)
    """What `layer_types` may say."""


_FAMILIES: dict[str, _Family] = {
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3": _Family("Qwen3ForCausalLM", _qwen3),
    "llama": _Family("LlamaForCausalLM", _llama),
    "glm4_moe": _Family("Glm4MoeForCausalLM", _glm4_moe),
    "minimax_m2": _Family("MiniMaxM2ForCausalLM", _minimax_m2),
    "gpt_oss": _Family("GptOssForCausalLM", _gpt_oss, ("full_attention", "sliding_attention")),
    "deepseek_v3": _Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "deepseek_v32": _Family("DeepseekV32ForCausalLM", _deepseek_v32, ("indexed_attention",)),
    "glm_moe_dsa": _Family("GlmMoeDsaForCausalLM", _glm_moe_dsa, ("indexed_attention",)),
}
