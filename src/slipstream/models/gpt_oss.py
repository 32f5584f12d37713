"""gpt-oss: experts in every layer, attention sinks, every other layer with a sliding window, biases everywhere, a clamped activation.

Architecture: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2. The checkpoint holds the experts of a layer as one
tensor [E, in, out] with the columns of gate and up in turn; ours are the same tensors.
"""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.models.layers import Attention, Block, MoE, empty
from slipstream.models.names import ATTENTION, DECODER, FFN_NORM, Columns, ExpertStack, NameTable, Same
from slipstream.models.spec import ModelSpec
from slipstream.ops import clamped_experts

_MLP = "model.layers.{layer}.mlp"
NAMES = NameTable(
    model=DECODER,
    layer=(
        *ATTENTION,
        Same("layers.{layer}.attention.sinks", "model.layers.{layer}.self_attn.sinks"),
        FFN_NORM,
        Columns("layers.{layer}.ffn.router", ((f"{_MLP}.router.weight", "num_experts"),)),
        Same("layers.{layer}.ffn.router_logit_bias", f"{_MLP}.router.bias"),
        ExpertStack("layers.{layer}.ffn.experts.gate_up", f"{_MLP}.experts.gate_up_proj", ("expert_intermediate",) * 2),
        Same("layers.{layer}.ffn.experts.gate_up_bias", f"{_MLP}.experts.gate_up_proj_bias"),
        ExpertStack("layers.{layer}.ffn.experts.down", f"{_MLP}.experts.down_proj", ("hidden",)),
        Same("layers.{layer}.ffn.experts.down_bias", f"{_MLP}.experts.down_proj_bias"),
    ),
)


class ClampedExperts(nn.Module):
    """The expert weights, in the place of `layers.Experts`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.clamped is not None
        self.activation = spec.clamped
        self.gate_up = empty(spec.num_experts, spec.hidden, 2 * spec.expert_intermediate)
        self.gate_up_bias = empty(spec.num_experts, 2 * spec.expert_intermediate)
        self.down = empty(spec.num_experts, spec.expert_intermediate, spec.hidden)
        self.down_bias = empty(spec.num_experts, spec.hidden)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        weights = self.gate_up, self.gate_up_bias, self.down, self.down_bias
        return clamped_experts(x_TD, ids_TK, gates_TK, *weights, self.activation.alpha, self.activation.limit)


def block(spec: ModelSpec, layer: int) -> Block:
    return Block(spec, Attention(spec, layer), MoE(spec, layer, ClampedExperts(spec)))
