"""DeepSeek-V3: multi-head latent attention, and the mixture of experts that GLM-4.5 took over.

Architecture: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.
"""

from __future__ import annotations

from slipstream.models.glm4_moe import BIAS_AND_SHARED_EXPERT
from slipstream.models.latent import LatentAttention
from slipstream.models.layers import Block, feed_forward
from slipstream.models.names import DECODER, DENSE, Columns, NameTable, Same, Stacked
from slipstream.models.qwen3_moe import EXPERTS
from slipstream.models.spec import ModelSpec

_ATTENTION = "model.layers.{layer}.self_attn"
_KV_DOWN = f"{_ATTENTION}.kv_a_proj_with_mqa"
LATENT_ATTENTION = (
    Same("layers.{layer}.attention_norm", "model.layers.{layer}.input_layernorm.weight"),
    Columns(
        "layers.{layer}.attention.qkv_down",
        ((f"{_ATTENTION}.q_a_proj.weight", "latent.q_rank"), (f"{_KV_DOWN}.weight", "kv_down_rows")),
    ),
    Stacked(
        "layers.{layer}.attention.qkv_down_bias",
        ((f"{_ATTENTION}.q_a_proj.bias", "latent.q_rank"), (f"{_KV_DOWN}.bias", "kv_down_rows")),
    ),
    Same("layers.{layer}.attention.q_norm", f"{_ATTENTION}.q_a_layernorm.weight"),
    Columns("layers.{layer}.attention.q_up", ((f"{_ATTENTION}.q_b_proj.weight", "q_latent_rows"),)),
    Columns(
        "layers.{layer}.attention.q_kv_down",
        ((f"{_ATTENTION}.q_proj.weight", "q_latent_rows"), (f"{_KV_DOWN}.weight", "kv_down_rows")),
    ),
    Same("layers.{layer}.attention.kv_down_bias", f"{_KV_DOWN}.bias"),
    Same("layers.{layer}.attention.kv_norm", f"{_ATTENTION}.kv_a_layernorm.weight"),
    Columns("layers.{layer}.attention.kv_up", ((f"{_ATTENTION}.kv_b_proj.weight", "kv_up_rows"),)),
    Columns("layers.{layer}.attention.out", ((f"{_ATTENTION}.o_proj.weight", "hidden"),)),
    Same("layers.{layer}.attention.out_bias", f"{_ATTENTION}.o_proj.bias"),
)
"""With a short vector for queries (`qkv_down`, `q_norm`, `q_up`) or without (`q_kv_down`)."""
NAMES = NameTable(model=DECODER, layer=(*LATENT_ATTENTION, *DENSE, *EXPERTS, *BIAS_AND_SHARED_EXPERT))


def block(spec: ModelSpec, layer: int) -> Block:
    return Block(spec, LatentAttention(spec, layer), feed_forward(spec, layer))
