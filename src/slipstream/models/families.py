"""What each family's `config.json` says, as fields of `ModelSpec`: one reader a family, every value checked.

Torch-free. An option of the published architecture that is not implemented here (a sliding window, scaled rotary positions, another
activation) is refused by name, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.parts import ClampedGlu, Latent, Yarn


def read_options(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of `ModelSpec`, not yet checked against one another. `source` names the config in errors.

    Raises ModelError: an unknown family, a key that is missing or of the wrong kind, an option that is not implemented.
    """
    reader = _Reader(config, source)
    family = config.get("model_type")
    if family not in _FAMILIES:
        supported = ", ".join(_FAMILIES)
        raise ModelError(f"{source}: model_type = {family!r} is not supported; slipstream implements {supported}")
    known = _FAMILIES[family]
    reader.refuse_unless("architectures", lambda names: names is None or known.architecture in names, f"[{known.architecture!r}]")
    kinds = " or ".join(repr(kind) for kind in known.layer_kinds)
    reader.refuse_unless("layer_types", lambda given: given is None or set(given) <= {*known.layer_kinds}, f"{kinds} in every layer")
    for key, implemented, accepts in _IMPLEMENTED:
        reader.refuse_unless(key, accepts, implemented)
    return {"family": family, **_common_fields(reader), **known.fields(reader)}


class _Reader:
    """Typed access to the keys of one config object; every error names the file, the key and the value."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is present, as a positive integer."""
        value = self.first(*keys, default=default)
        if value is None:
            raise ModelError(f"{self.source}: {keys[0]} is missing; it is required for model_type {self.config.get('model_type')!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.source}: {keys[0]} = {value!r}; expected a positive integer")
        return value

    def count(self, *keys: str, default: int = 0) -> int:
        """The first of `keys` that is present, as an integer that may be 0."""
        value = self.first(*keys, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"{self.source}: {keys[0]} = {value!r}; expected an integer of at least 0")
        return value

    def first(self, *keys: str, default: Any) -> Any:
        """The value of the first of `keys` that is present and not null."""
        return next((self.config[key] for key in keys if self.config.get(key) is not None), default)

    def real(self, value: Any, key: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.source}: {key} = {value!r}; expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.source}: {key} = {value!r}; expected true or false")
        return default if value is None else value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, or one; nothing reads as ()."""
        value = self.config.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise ModelError(f"{self.source}: {key} = {value!r}; expected an integer or a list of integers")
        return tuple(items)

    def refuse_unless(self, key: str, accepts: Callable[[Any], bool], implemented: str) -> None:
        value = self.config.get(key)
        if not accepts(value):
            raise ModelError(f"{self.source}: {key} = {value!r} is not supported; slipstream implements {key} = {implemented} only")


def _off(value: Any) -> bool:
    return value is None or value is False or value == 0 or value == {}


_IMPLEMENTED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("hidden_act", "'silu'", lambda value: value in (None, "silu")),
    ("use_sliding_window", "false", _off),
    ("attention_dropout", "0", _off),
    ("mlp_bias", "false", _off),
    ("rope_interleaved", "false", _off),
    ("quantization_config", "null (weights in float32, bfloat16 or float16: see docs/models.md for how to convert)", _off),
)
"""Options that change the numbers: key, what is implemented, and whether a value means that. A key that is absent is None."""


def _common_fields(reader: _Reader) -> dict[str, Any]:
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


def _rope(reader: _Reader, partial: float | None = None, theta: float = 10000.0) -> dict[str, Any]:
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


def _rope_options(reader: _Reader, kinds: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
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


def _yarn(reader: _Reader, options: Mapping[str, Any]) -> tuple[Yarn, float]:
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


def _llama(reader: _Reader) -> dict[str, Any]:
    return {"head_dim": reader.number("head_dim", default=_even_share(reader)), "out_bias": reader.flag("attention_bias"), **_rope(reader)}


def _qwen3(reader: _Reader) -> dict[str, Any]:
    return {"head_dim": reader.number("head_dim"), "qk_norm": True, "out_bias": reader.flag("attention_bias"), **_rope(reader)}


def _qwen3_moe(reader: _Reader) -> dict[str, Any]:
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


def _glm4_moe(reader: _Reader) -> dict[str, Any]:
    return {
        **_rope(reader, partial=0.5),
        **_grouped_sigmoid_moe(reader),
        "head_dim": reader.number("head_dim", default=_even_share(reader)),
        "qk_norm": reader.flag("use_qk_norm"),
    }


def _minimax_m2(reader: _Reader) -> dict[str, Any]:
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
    ("attention_bias", "false", _off),
    ("shared_intermediate_size", "0", _off),
    ("router_jitter_noise", "0", _off),
)


def _gpt_oss(reader: _Reader) -> dict[str, Any]:
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


def _deepseek_v3(reader: _Reader) -> dict[str, Any]:
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
        **_grouped_sigmoid_moe(reader, dense=3, groups=8, top_groups=4, scale=2.5),
        "rope_theta": reader.real(options.get("rope_theta", reader.first("rope_theta", default=10000.0)), "rope_theta"),
        "head_dim": max(latent.nope_dim + latent.rope_dim, latent.v_dim),
        "num_kv_heads": heads,
        "out_bias": reader.flag("attention_bias"),
        "latent": latent,
        "yarn": yarn,
    }


def _grouped_sigmoid_moe(reader: _Reader, dense: int = 1, groups: int = 1, top_groups: int = 1, scale: float = 1.0) -> dict[str, Any]:
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


def _even_share(reader: _Reader) -> int:
    return max(1, reader.number("hidden_size") // reader.number("num_attention_heads"))


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    """As `architectures` of config.json names it."""
    fields: Callable[[_Reader], dict[str, Any]]
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
}
