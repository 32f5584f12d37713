"""The parts of a decoder layer: norm, attention, dense and mixture-of-experts feed-forward.

Written for few operations a layer: projections that read the same input are one matrix, laid out [in, out] for a plain matmul.
They know no rank, cache or configuration file: what attention sees and which experts are taken comes from the context.

Shapes: T tokens, D hidden features, H query heads, G key/value heads, d head features, E experts, K experts per token, I expert or
feed-forward features, F = 2 I (gate first, then up).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.context import Context
from slipstream.models.spec import ModelSpec
from slipstream.ops import experts, rms_norm, rope


def empty(*shape: int) -> nn.Parameter:
    """A parameter without values yet, of the default dtype and device."""
    return nn.Parameter(torch.empty(*shape))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; query/key norm and biases where the model has them."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, spec.rms_eps
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        fused = spec.q_rows + 2 * spec.kv_rows
        self.qkv = empty(spec.hidden, fused)
        self.out = empty(spec.q_rows, spec.hidden)
        self.qkv_bias = empty(fused) if spec.attention_bias else None
        self.out_bias = empty(spec.hidden) if spec.attention_bias else None
        self.q_norm = empty(spec.head_dim) if spec.qk_norm else None
        self.k_norm = empty(spec.head_dim) if spec.qk_norm else None

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, ctx: Context) -> Tensor:
        qkv = _linear(x_TD, self.qkv, self.qkv_bias).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q_THd, k_TGd, v_TGd = qkv.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = rms_norm(q_THd, self.q_norm, self.eps), rms_norm(k_TGd, self.k_norm, self.eps)
        q_THd, k_TGd = rope(q_THd, k_TGd, cos_Td, sin_Td)
        return _linear(ctx.attend(self.layer, q_THd, k_TGd, v_TGd).flatten(1), self.out, self.out_bias)


class DenseFFN(nn.Module):
    """down( silu(gate(x)) · up(x) )."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = empty(spec.hidden, 2 * spec.intermediate)
        self.down = empty(spec.intermediate, spec.hidden)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        gate_TI, up_TI = torch.mm(x_TD, self.gate_up).chunk(2, dim=-1)
        return torch.mm(F.silu(gate_TI) * up_TI, self.down)


class Experts(nn.Module):
    """The expert weights. A module of its own so that expert parallelism can replace it from outside."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = empty(spec.num_experts, spec.hidden, 2 * spec.expert_intermediate)
        self.down = empty(spec.num_experts, spec.expert_intermediate, spec.hidden)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return experts(x_TD, ids_TK, gates_TK, self.gate_up, self.down)


class MoE(nn.Module):
    """A softmax router over experts, the `moe_layer`-th of the model.

    The router computes in fp32 whatever the model's dtype: it decides between experts, and trainer and engine should decide alike.
    """

    def __init__(self, spec: ModelSpec, moe_layer: int) -> None:
        super().__init__()
        self.moe_layer, self.top_k, self.norm_top_k = moe_layer, spec.top_k, spec.norm_top_k
        self.router = empty(spec.hidden, spec.num_experts)
        self.experts = Experts(spec)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        scores_TE = torch.mm(x_TD.float(), self.router.float())
        ids_TK = ctx.route(self.moe_layer, scores_TE, self.top_k)
        # a softmax over the chosen scores is the softmax over all of them divided by the sum of the chosen
        gates_TK = scores_TE.gather(1, ids_TK).softmax(-1) if self.norm_top_k else scores_TE.softmax(-1).gather(1, ids_TK)
        return self.experts(x_TD, ids_TK, gates_TK)


class Block(nn.Module):
    """One pre-norm decoder layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, attention: Attention, ffn: DenseFFN | MoE) -> None:
        super().__init__()
        self.eps = spec.rms_eps
        self.attention_norm, self.attention = empty(spec.hidden), attention
        self.ffn_norm, self.ffn = empty(spec.hidden), ffn

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, ctx: Context) -> Tensor:
        x_TD = x_TD + self.attention(rms_norm(x_TD, self.attention_norm, self.eps), cos_Td, sin_Td, ctx)
        return x_TD + self.ffn(rms_norm(x_TD, self.ffn_norm, self.eps), ctx)


def _linear(x_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x_TD, weight) if bias is None else torch.addmm(bias, x_TD, weight)
