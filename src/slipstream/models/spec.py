"""What a decoder looks like: the numbers of `config.json` under our names (`families` reads them), checked.

Torch-free: login nodes and planners read model sizes with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import ModelError
from slipstream.models.families import read_options
from slipstream.models.parts import ClampedGlu, Indexer, Latent, Yarn


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and options of one decoder-only transformer."""

    family: str
    """`model_type` of config.json."""
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
    rotary_factor: float = 1.0
    """Share of each head that is rotated by position; the rest of its features passes through."""
    yarn: Yarn | None = None
    latent: Latent | None = None
    """Multi-head latent attention in place of grouped heads; `head_dim` and `num_kv_heads` are then those of the expanded heads."""
    indexer: Indexer | None = None
    """Sparse latent attention."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    """One norm over all query heads together and one over all key heads, not one over each head."""
    window: int = 0
    """Tokens that a query of the `window_layers` sees, itself among them."""
    window_layers: tuple[int, ...] = ()
    sinks: bool = False
    """A learned score a head that takes part in every softmax of the attention and has no value."""
    moe_layers: tuple[int, ...] = ()
    """Decoder layers whose feed-forward part is a mixture of experts, ascending."""
    num_experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Features of the expert that every token of an MoE layer takes beside the chosen ones; 0: none."""
    clamped: ClampedGlu | None = None
    """Experts with this activation, and with biases."""
    router_logit_bias: bool = False
    """A bias that is part of the router's logits and is trained, other than `router_bias`."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """What the router makes of its logits; see `models.router` for this and the following."""
    router_bias: bool = False
    """A number an expert that is added for choosing only, and that no gradient reaches."""
    num_groups: int = 1
    top_groups: int = 1
    """Only experts of the best `top_groups` of `num_groups` groups can be chosen."""
    norm_top_k: bool = False
    """Gate weights of the chosen experts are divided by their sum."""
    gate_scale: float = 1.0
    prediction_layers: int = 0
    """Layers behind the last one that the checkpoint may hold, for guessing further tokens: carried along, neither trained nor served."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a reply: of generation_config.json where it has them, else of config.json."""
    dtype: str = "float32"
    """Type of the stored weights, as torch spells it. Loading may ask for another one."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read `config.json` (and the end-of-reply ids of `generation_config.json`) of an HF model folder.

        Raises ModelError: the file is missing or broken, or the architecture or one of its options is not supported.
        """
        return cls.from_config(read_config(folder), str(Path(folder) / "config.json"))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config") -> ModelSpec:
        """From the object in config.json. `source` names it in errors. Raises ModelError, see `from_folder`."""
        spec = cls(**read_options(config, source))
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
    def rotary_dim(self) -> int:
        """Features of a head that are rotated by position, the first of them."""
        return self.latent.rope_dim if self.latent is not None else int(self.head_dim * self.rotary_factor)

    @property
    def q_latent_rows(self) -> int:
        """Features of all query heads together, of latent attention."""
        return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim) if self.latent is not None else 0

    @property
    def kv_down_rows(self) -> int:
        """Features that keys and values are made of, and the rotated part of all keys."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent is not None else 0

    @property
    def kv_up_rows(self) -> int:
        """Features of all keys (the part without position) and values together."""
        return self.num_heads * (self.latent.nope_dim + self.latent.v_dim) if self.latent is not None else 0

    @property
    def index_rows(self) -> int:
        """Features of all index queries together."""
        return self.indexer.heads * self.indexer.head_dim if self.indexer is not None else 0

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers that choose the tokens they see; the others of a sparse model take an earlier layer's choice."""
        return tuple(sorted(set(self.indexer.sources))) if self.indexer is not None else ()

    @property
    def num_params(self) -> int:
        """Stored parameters; a tied head counts once, prediction layers not at all."""
        return self._params(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """Parameters that take part in one token: of the experts only the chosen ones."""
        return self._params(self.top_k)

    def layer_params(self, layer: int) -> int:
        """Stored parameters of decoder layer `layer` outside of its routed experts."""
        indexer = self._indexer_params() if layer in self.index_layers else 0
        around = self._attention_params() + 2 * self.hidden + indexer
        if layer not in self.moe_layers:
            return around + 3 * self.hidden * self.intermediate
        router = (self.hidden + self.router_bias + self.router_logit_bias) * self.num_experts
        return around + router + 3 * self.hidden * self.shared_intermediate

    @property
    def expert_params(self) -> int:
        """Stored parameters of one routed expert of one layer."""
        biases = (2 * self.expert_intermediate + self.hidden) * (self.clamped is not None)
        return 3 * self.hidden * self.expert_intermediate + biases

    @property
    def end_params(self) -> int:
        """Stored parameters outside of the layers: embedding, final norm, head."""
        return self.vocab_size * self.hidden * (1 if self.tie_embeddings else 2) + self.hidden

    @property
    def indexer_params(self) -> int:
        """Stored parameters of all indexers, which are not trained."""
        return self._indexer_params() * len(self.index_layers)

    def _params(self, experts: int) -> int:
        layers = sum(self.layer_params(layer) for layer in range(self.num_layers))
        return layers + self.expert_params * experts * len(self.moe_layers) + self.end_params

    def _indexer_params(self) -> int:
        if self.indexer is None or self.latent is None:
            return 0
        return self.latent.q_rank * self.index_rows + (self.hidden + 2) * self.indexer.head_dim + self.hidden * self.indexer.heads

    def _attention_params(self) -> int:
        if self.latent is None:
            normed = self.q_rows + self.kv_rows if self.qk_norm_joint else 2 * self.head_dim
            matrices = self.hidden * 2 * (self.q_rows + self.kv_rows) + normed * self.qk_norm
            biases = (self.q_rows + 2 * self.kv_rows) * self.qkv_bias + self.hidden * self.out_bias
            return matrices + biases + self.num_heads * self.sinks
        q_rank, kv_rank = self.latent.q_rank, self.latent.kv_rank
        queries = (self.hidden + self.q_latent_rows + 1) * q_rank if q_rank else self.hidden * self.q_latent_rows
        keys_values = self.hidden * self.kv_down_rows + kv_rank * (1 + self.kv_up_rows)
        biases = (q_rank + self.kv_down_rows) * self.qkv_bias + self.hidden * self.out_bias
        return queries + keys_values + self.num_heads * self.latent.v_dim * self.hidden + biases


def _check(spec: ModelSpec, source: str) -> None:
    """Sizes that do not go together."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{source}: num_attention_heads = {spec.num_heads} is no multiple of num_key_value_heads = {spec.num_kv_heads}")
    if spec.rotary_dim % 2 or not spec.rotary_dim:
        part = "" if spec.rotary_factor == 1 else f" of which partial_rotary_factor = {spec.rotary_factor} rotates {spec.rotary_dim}"
        raise ModelError(f"{source}: head_dim = {spec.head_dim}{part}; rotary positions need an even number")
    if spec.indexer is not None and spec.indexer.head_dim < spec.rotary_dim:
        raise ModelError(f"{source}: index_head_dim = {spec.indexer.head_dim} is less than qk_rope_head_dim = {spec.rotary_dim}")
    if spec.top_k > spec.num_experts:
        raise ModelError(f"{source}: num_experts_per_tok = {spec.top_k} is more than num_experts = {spec.num_experts}")
    if spec.num_groups > 1 or spec.top_groups > 1:
        _check_groups(spec, source)


def _check_groups(spec: ModelSpec, source: str) -> None:
    """A group is ranked by its two best experts, and the chosen groups must hold enough experts."""
    size, rest = divmod(spec.num_experts, spec.num_groups)
    if rest or size < 2:
        raise ModelError(f"{source}: n_group = {spec.num_groups} does not cut {spec.num_experts} experts into equal groups of two or more")
    if spec.top_groups > spec.num_groups:
        raise ModelError(f"{source}: topk_group = {spec.top_groups} is more than n_group = {spec.num_groups}")
    if spec.top_k > spec.top_groups * size:
        raise ModelError(
            f"{source}: num_experts_per_tok = {spec.top_k}, but topk_group = {spec.top_groups} groups hold {spec.top_groups * size} experts"
        )


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder, with the end-of-reply ids of `generation_config.json` where it has them. Raises ModelError."""
    folder = Path(folder)
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json; expected an HF folder as save_pretrained writes it")
    config = dict(_read_object(file))
    generation = folder / "generation_config.json"
    if generation.is_file() and (eos := _read_object(generation).get("eos_token_id")) is not None:
        config["eos_token_id"] = eos
    return config


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}; expected an object")
    return config
