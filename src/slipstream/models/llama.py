"""Llama (and SmolLM2, which is one): dense, biases by option. Architecture: Touvron et al., "Llama 2", 2023, section 2.2."""

from __future__ import annotations

from slipstream.models.layers import Attention, Block, feed_forward
from slipstream.models.names import ATTENTION, DECODER, DENSE, NameTable
from slipstream.models.spec import ModelSpec

NAMES = NameTable(model=DECODER, layer=(*ATTENTION, *DENSE))


def block(spec: ModelSpec, layer: int) -> Block:
    return Block(spec, Attention(spec, layer), feed_forward(spec, layer))
