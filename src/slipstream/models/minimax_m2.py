"""MiniMax-M2: experts in every layer, sigmoid router with a routing bias, one query/key norm over all heads, part of each head rotated.

Architecture: MiniMax, config.json and model card of MiniMax-M2, 2025. The checkpoint names its parts as Mixtral's does: w1 is the gate,
w3 the other factor, w2 the way back.
"""

from __future__ import annotations

from slipstream.models.names import ATTENTION, DECODER, FFN_NORM, Columns, ExpertColumns, NameTable, Same
from slipstream.models.qwen3 import QK_NORM
from slipstream.models.qwen3_moe import block

_MOE = "model.layers.{layer}.block_sparse_moe"
_EXPERTS = (
    Columns("layers.{layer}.ffn.router", ((f"{_MOE}.gate.weight", "num_experts"),)),
    Same("layers.{layer}.ffn.router_bias", f"{_MOE}.e_score_correction_bias"),
    ExpertColumns(
        "layers.{layer}.ffn.experts.gate_up",
        (
            (f"{_MOE}.experts.{{expert}}.w1.weight", "expert_intermediate"),
            (f"{_MOE}.experts.{{expert}}.w3.weight", "expert_intermediate"),
        ),
    ),
    ExpertColumns("layers.{layer}.ffn.experts.down", ((f"{_MOE}.experts.{{expert}}.w2.weight", "hidden"),)),
)
NAMES = NameTable(model=DECODER, layer=(*ATTENTION, *QK_NORM, FFN_NORM, *_EXPERTS))

__all__ = ["NAMES", "block"]
