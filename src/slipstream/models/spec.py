"""What a decoder looks like: the numbers of `config.json` under our names, checked.

Torch-free: login nodes and planners read model sizes with it. An option of the published architecture that is not implemented here
(a sliding window, scaled rotary positions, another activation) is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and options of one decoder-only transformer."""

    family: str
    """`model_type` of config.json: 'qwen3_moe', 'qwen3' or 'llama'."""
    vocab_size: int
    hidden: int
    intermediate: int
    """Features of a dense feed-forward layer; of an expert see `expert_intermediate`."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Longest sequence in tokens that the position table covers."""
    rope_theta: float
    rms_eps: float
    tie_embeddings: bool
    """The output head is the embedding; the checkpoint then has no lm_head."""
    attention_bias: bool = False
    qk_norm: bool = False
    moe_layers: tuple[int, ...] = ()
    """Decoder layers whose feed-forward part is a mixture of experts, ascending."""
    num_experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    norm_top_k: bool = False
    """Gate weights of the chosen experts are divided by their sum."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a reply: of generation_config.json where it has them, else of config.json."""
    dtype: str = "float32"
    """Type of the stored weights, as torch spells it. Loading may ask for another one."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read `config.json` (and the end-of-reply ids of `generation_config.json`) of an HF model folder.

        Raises ModelError: the file is missing or broken, or the architecture or one of its options is not supported.
        """
        folder = Path(folder)
        file = folder / "config.json"
        if not file.is_file():
            raise ModelError(f"{folder} is not a model folder: it has no config.json; expected an HF folder as save_pretrained writes it")
        config = dict(_read_object(file))
        generation = folder / "generation_config.json"
        if generation.is_file() and (eos := _read_object(generation).get("eos_token_id")) is not None:
            config["eos_token_id"] = eos
        return cls.from_config(config, str(file))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config") -> ModelSpec:
        """From the object in config.json. `source` names it in errors. Raises ModelError, see `from_folder`."""
        reader = _Reader(config, source)
        family = config.get("model_type")
        if family not in _FAMILIES:
            supported = ", ".join(_FAMILIES)
            raise ModelError(f"{source}: model_type = {family!r} is not supported; slipstream implements {supported}")
        architecture, family_fields = _FAMILIES[family]
        reader.refuse_unless("architectures", lambda names: names is None or architecture in names, f"[{architecture!r}]")
        for key, implemented, accepts in _IMPLEMENTED:
            reader.refuse_unless(key, accepts, implemented)
        spec = cls(family=family, **_common_fields(reader), **family_fields(reader))
        _check(spec, source)
        return spec

    @property
    def q_rows(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Stored parameters; a tied head counts once."""
        return self._params(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """Parameters that take part in one token: of the experts only the chosen ones."""
        return self._params(self.top_k)

    def _params(self, experts: int) -> int:
        attention = self.hidden * 2 * (self.q_rows + self.kv_rows) + 2 * self.hidden
        attention += 2 * self.head_dim * self.qk_norm + (self.q_rows + 2 * self.kv_rows + self.hidden) * self.attention_bias
        dense = 3 * self.hidden * self.intermediate * (self.num_layers - len(self.moe_layers))
        moe = (3 * self.hidden * self.expert_intermediate * experts + self.hidden * self.num_experts) * len(self.moe_layers)
        ends = self.vocab_size * self.hidden * (1 if self.tie_embeddings else 2) + self.hidden
        return attention * self.num_layers + dense + moe + ends


class _Reader:
    """Typed access to the keys of one config object; every error names the file, the key and the value."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is present, as a positive integer."""
        value = next((self.config[key] for key in keys if self.config.get(key) is not None), default)
        if value is None:
            raise ModelError(f"{self.source}: {keys[0]} is missing; it is required for model_type {self.config.get('model_type')!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.source}: {keys[0]} = {value!r}; expected a positive integer")
        return value

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
    ("layer_types", "'full_attention' in every layer", lambda kinds: kinds is None or set(kinds) <= {"full_attention"}),
    ("attention_dropout", "0", _off),
    ("mlp_bias", "false", _off),
    ("rope_interleaved", "false", _off),
    ("partial_rotary_factor", "1", lambda value: value in (None, 1, 1.0)),
    ("quantization_config", "null (weights in float32, bfloat16 or float16)", _off),
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
        "rope_theta": _rope_theta(reader),
        "rms_eps": reader.real(reader.config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        "tie_embeddings": reader.flag("tie_word_embeddings"),
        "attention_bias": reader.flag("attention_bias"),
        "eos_ids": reader.integers("eos_token_id"),
        "dtype": str(dtype),
    }


def _rope_theta(reader: _Reader) -> float:
    """transformers 5 writes `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`."""
    config = reader.config
    for key in ("rope_parameters", "rope_scaling"):
        options = config.get(key) or {}
        nested = any(isinstance(value, dict) for value in options.values())
        kind = options.get("rope_type", options.get("type", "default"))
        if kind != "default" or nested or options.get("partial_rotary_factor", 1) != 1:
            raise ModelError(
                f"{reader.source}: {key} = {json.dumps(options)} is not supported; slipstream implements rope_type 'default' "
                "over whole heads, without scaling"
            )
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 10000.0))
    return reader.real(theta, "rope_theta")


def _llama(reader: _Reader) -> dict[str, Any]:
    return {"head_dim": reader.number("head_dim", default=_even_share(reader))}


def _qwen3(reader: _Reader) -> dict[str, Any]:
    return {"head_dim": reader.number("head_dim"), "qk_norm": True}


def _qwen3_moe(reader: _Reader) -> dict[str, Any]:
    num_layers, step = reader.number("num_hidden_layers"), reader.number("decoder_sparse_step", default=1)
    dense = set(reader.integers("mlp_only_layers"))
    return {
        "head_dim": reader.number("head_dim", default=_even_share(reader)),
        "qk_norm": True,
        "moe_layers": tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        "num_experts": reader.number("num_experts", "num_local_experts"),
        "top_k": reader.number("num_experts_per_tok"),
        "expert_intermediate": reader.number("moe_intermediate_size"),
        "norm_top_k": reader.flag("norm_topk_prob"),
    }


def _even_share(reader: _Reader) -> int:
    return max(1, reader.number("hidden_size") // reader.number("num_attention_heads"))


_FAMILIES: dict[str, tuple[str, Callable[[_Reader], dict[str, Any]]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "llama": ("LlamaForCausalLM", _llama),
}


def _check(spec: ModelSpec, source: str) -> None:
    """Sizes that do not go together."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{source}: num_attention_heads = {spec.num_heads} is no multiple of num_key_value_heads = {spec.num_kv_heads}")
    if spec.head_dim % 2:
        raise ModelError(f"{source}: head_dim = {spec.head_dim}; rotary positions need an even number")
    if spec.top_k > spec.num_experts:
        raise ModelError(f"{source}: num_experts_per_tok = {spec.top_k} is more than num_experts = {spec.num_experts}")


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}; expected an object")
    return config
