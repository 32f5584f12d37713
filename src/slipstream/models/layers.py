"""The parts of a decoder layer: norm, attention, dense and mixture-of-experts feed-forward.

Written for few operations a layer: projections that read the same input are one matrix, laid out [in, out] for a plain matmul.
They know no rank, cache or configuration file: what attention sees and which experts are taken comes from the context.

Shapes: T tokens, D hidden features, H query heads, G key/value heads, d head features, r rotated features of them, E experts,
K experts per token, I expert or feed-forward features, F = 2 I (gate first, then up).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.context import Context
from slipstream.models.router import choice_scores, gate_weights
from slipstream.models.spec import ModelSpec
from slipstream.ops import Sight, experts, rms_norm, rope


def empty(*shape: int) -> nn.Parameter:
    """A parameter without values yet, of the default dtype and device."""
    return nn.Parameter(torch.empty(*shape))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; query/key norm, biases, sinks and a window where the model has them."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, spec.rms_eps
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        fused = spec.q_rows + 2 * spec.kv_rows
        self.qkv = empty(spec.hidden, fused)
        self.out = empty(spec.q_rows, spec.hidden)
        self.qkv_bias = empty(fused) if spec.qkv_bias else None
        self.out_bias = empty(spec.hidden) if spec.out_bias else None
        self.sinks = empty(spec.num_heads) if spec.sinks else None
        self.window = spec.window if layer in spec.window_layers else 0
        self.joint = spec.qk_norm_joint
        self.q_norm = empty(spec.q_rows if self.joint else spec.head_dim) if spec.qk_norm else None
        self.k_norm = empty(spec.kv_rows if self.joint else spec.head_dim) if spec.qk_norm else None

    def forward(self, x_TD: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, ctx: Context) -> Tensor:
        qkv = linear(x_TD, self.qkv, self.qkv_bias).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q_THd, k_TGd, v_TGd = qkv.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = self._normed(q_THd, self.q_norm), self._normed(k_TGd, self.k_norm)
        q_THd, k_TGd = rope(q_THd, k_TGd, cos_Tr, sin_Tr)
        sight = Sight(self.window, self.sinks) if self.window or self.sinks is not None else None
        return linear(ctx.attend(self.layer, q_THd, k_TGd, v_TGd, sight).flatten(1), self.out, self.out_bias)

    def _normed(self, x_THd: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x_THd.flatten(1), weight, self.eps).view_as(x_THd) if self.joint else rms_norm(x_THd, weight, self.eps)


class DenseFFN(nn.Module):
    """down( silu(gate(x)) · up(x) )."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = empty(hidden, 2 * intermediate)
        self.down = empty(intermediate, hidden)

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
    """A router over experts (`models.router`), the `moe_layer`-th of the model; a shared expert and biases where it has them.

    The router computes in fp32 whatever the model's dtype: it decides between experts, and trainer and engine should decide alike.
    """

    def __init__(self, spec: ModelSpec, moe_layer: int, expert_stack: nn.Module | None = None) -> None:
        """`expert_stack`: of a family whose experts are others than `Experts`."""
        super().__init__()
        self.spec, self.moe_layer = spec, moe_layer
        self.router = empty(spec.hidden, spec.num_experts)
        bias_E = torch.empty(spec.num_experts, dtype=torch.float32)
        self.router_bias = nn.Parameter(bias_E, requires_grad=False) if spec.router_bias else None
        self.router_logit_bias = empty(spec.num_experts) if spec.router_logit_bias else None
        self.experts = expert_stack or Experts(spec)
        self.shared = DenseFFN(spec.hidden, spec.shared_intermediate) if spec.shared_intermediate else None

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        logit_bias = None if self.router_logit_bias is None else self.router_logit_bias.float()
        logits_TE = linear(x_TD.float(), self.router.float(), logit_bias)
        ids_TK = ctx.route(self.moe_layer, choice_scores(logits_TE, self.router_bias, self.spec), self.spec.top_k)
        gates_TK = ctx.weigh(self.moe_layer, logits_TE, gate_weights(logits_TE, ids_TK, self.spec))
        y_TD = self.experts(x_TD, ids_TK, gates_TK)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD, ctx)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """What `to` and `to_empty` go through. The bias moves, but is never rounded: its steps are far below the precision of bf16.

        Seen as integers it looks like nothing that a change of dtype concerns.
        """
        bias = self.router_bias
        return super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32) if t is bias else fn(t), recurse)


class Block(nn.Module):
    """One pre-norm decoder layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, attention: nn.Module, ffn: DenseFFN | MoE) -> None:
        super().__init__()
        self.eps = spec.rms_eps
        self.attention_norm, self.attention = empty(spec.hidden), attention
        self.ffn_norm, self.ffn = empty(spec.hidden), ffn

    def forward(self, x_TD: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, ctx: Context) -> Tensor:
        x_TD = x_TD + self.attention(rms_norm(x_TD, self.attention_norm, self.eps), cos_Tr, sin_Tr, ctx)
        return x_TD + self.ffn(rms_norm(x_TD, self.ffn_norm, self.eps), ctx)


def feed_forward(spec: ModelSpec, layer: int) -> DenseFFN | MoE:
    """Of decoder layer `layer`."""
    if layer in spec.moe_layers:
        return MoE(spec, spec.moe_layers.index(layer))
    return DenseFFN(spec.hidden, spec.intermediate)


def linear(x_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weight, plus the bias where there is one."""
    return torch.mm(x_TD, weight) if bias is None else torch.addmm(bias, x_TD, weight)
