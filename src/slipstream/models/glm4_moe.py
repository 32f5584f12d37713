"""GLM-4.5: sigmoid router with a routing bias and groups, a shared expert, dense first layers, half of each head rotated.

Architecture: GLM-4.5 Team, "GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models", 2025, section 2.1; the mixture of experts
is DeepSeek-V3's.
"""

from __future__ import annotations

from slipstream.models.names import ATTENTION, DECODER, DENSE, Columns, NameTable, Same
from slipstream.models.qwen3 import QK_NORM
from slipstream.models.qwen3_moe import EXPERTS, block

BIAS_AND_SHARED_EXPERT = (
    Same("layers.{layer}.ffn.router_bias", "model.layers.{layer}.mlp.gate.e_score_correction_bias"),
    Columns(
        "layers.{layer}.ffn.shared.gate_up",
        (
            ("model.layers.{layer}.mlp.shared_experts.gate_proj.weight", "shared_intermediate"),
            ("model.layers.{layer}.mlp.shared_experts.up_proj.weight", "shared_intermediate"),
        ),
    ),
    Columns("layers.{layer}.ffn.shared.down", (("model.layers.{layer}.mlp.shared_experts.down_proj.weight", "hidden"),)),
)
NAMES = NameTable(model=DECODER, layer=(*ATTENTION, *QK_NORM, *DENSE, *EXPERTS, *BIAS_AND_SHARED_EXPERT))

__all__ = ["BIAS_AND_SHARED_EXPERT", "NAMES", "block"]
