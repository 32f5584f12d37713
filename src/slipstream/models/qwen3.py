"""Qwen3, dense: Llama's block with a norm over each query and key head. Architecture: Qwen team, "Qwen3 Technical Report", 2025."""

from __future__ import annotations

from slipstream.models.layers import Attention, Block, feed_forward
from slipstream.models.names import ATTENTION, DECODER, DENSE, NameTable, Same
from slipstream.models.spec import ModelSpec

QK_NORM = (
    Same("layers.{layer}.attention.q_norm", "model.layers.{layer}.self_attn.q_norm.weight"),
    Same("layers.{layer}.attention.k_norm", "model.layers.{layer}.self_attn.k_norm.weight"),
)
NAMES = NameTable(model=DECODER, layer=(*ATTENTION, *QK_NORM, *DENSE))


def block(spec: ModelSpec, layer: int) -> Block:
    return Block(spec, Attention(spec, layer), feed_forward(spec, layer))
