"""Qwen3-MoE: Qwen3 with a mixture of experts in place of some or all dense layers.

Architecture: Qwen team, "Qwen3 Technical Report", 2025, section 2. No shared expert; softmax router.
"""

from __future__ import annotations

from slipstream.models.layers import Attention, Block, feed_forward
from slipstream.models.names import ATTENTION, DECODER, DENSE, Columns, ExpertColumns, NameTable
from slipstream.models.qwen3 import QK_NORM
from slipstream.models.spec import ModelSpec

EXPERTS = (
    Columns("layers.{layer}.ffn.router", (("model.layers.{layer}.mlp.gate.weight", "num_experts"),)),
    ExpertColumns(
        "layers.{layer}.ffn.experts.gate_up",
        (
            ("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", "expert_intermediate"),
            ("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", "expert_intermediate"),
        ),
    ),
    ExpertColumns("layers.{layer}.ffn.experts.down", (("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", "hidden"),)),
)
NAMES = NameTable(model=DECODER, layer=(*ATTENTION, *QK_NORM, *DENSE, *EXPERTS))


def block(spec: ModelSpec, layer: int) -> Block:
    return Block(spec, Attention(spec, layer), feed_forward(spec, layer))
