"""The expert feed-forward networks of a Mixture-of-Experts layer, without dropping tokens.

It does not choose experts: ids and gate weights come in. Shapes: T tokens, K experts per token, E experts, D hidden features,
I expert features, F = 2 I (gate first, then up), N = T K (token, expert) pairs sorted by expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.errors import StateError
from slipstream.ops.fp8_weight import Fp8Weight
from slipstream.ops.native import LANES, check, loaded, native_for


def experts(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, gate_up_EDF: Tensor, down_EID: Tensor) -> Tensor:
    """y = Σ_k gate_k · down[id_k]( silu(gate[id_k](x)) · up[id_k](x) ).

    `ids` are integers in 0..E-1, `gates` any weights (need not sum to 1). Differentiable in x, gates and both weights.
    Native, also with gradients, for fp32 on the CPU with D and I multiples of 8; then a token's y is bitwise independent of the
    other tokens.
    """
    _check_shapes(x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)
    if isinstance(gate_up_EDF, Fp8Weight):
        return experts_reference(x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)
    kernels = (
        None if down_EID.shape[1] % LANES or down_EID.shape[2] % LANES else native_for(x_TD, gates_TK, gate_up_EDF, down_EID, training=True)
    )
    if kernels is None:
        return experts_reference(x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)
    inputs = [x_TD, ids_TK.long(), gates_TK, gate_up_EDF, down_EID]
    inputs = [x if x.is_contiguous() else x.contiguous() for x in inputs]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Experts.apply(*inputs)  # pyright: ignore[reportReturnType]
    return _forward(kernels, inputs, None)


def _forward(kernels: ctypes.CDLL, inputs: Sequence[Tensor], hidden_NF: Tensor | None) -> Tensor:
    x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID = inputs
    y_TD = torch.empty_like(x_TD)
    pointers = [x.data_ptr() for x in (x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID, y_TD)]
    kept = None if hidden_NF is None else hidden_NF.data_ptr()
    num_experts, inner, dim = down_EID.shape
    check(kernels.experts(*pointers, kept, None, *ids_TK.shape, num_experts, dim, inner), "experts")
    return y_TD


class _Experts(torch.autograd.Function):
    """The native kernels with a gradient. Keeps the pre-activations (N x F floats), recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x_TD, ids_TK, _, gate_up_EDF, _ = inputs
        hidden_NF = x_TD.new_empty(ids_TK.numel(), gate_up_EDF.shape[2])
        ctx.save_for_backward(*inputs, hidden_NF)
        return _forward(loaded(), inputs, hidden_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID, hidden_NF = ctx.saved_tensors
        outputs = [torch.empty_like(x) for x in (x_TD, gates_TK, gate_up_EDF, down_EID)]
        inputs = (x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID, hidden_NF, grads[0].contiguous())
        num_experts, inner, dim = down_EID.shape
        pointers = [x.data_ptr() for x in (*inputs, *outputs)]
        check(loaded().experts_backward(*pointers, *ids_TK.shape, num_experts, dim, inner), "experts backward")
        dx_TD, d_gates_TK, d_gate_up, d_down = outputs
        return dx_TD, None, d_gates_TK, d_gate_up, d_down


def _check_shapes(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, gate_up_EDF: Tensor, down_EID: Tensor) -> None:
    num_experts, inner, dim = down_EID.shape
    if gate_up_EDF.shape != (num_experts, dim, 2 * inner) or x_TD.shape != (len(ids_TK), dim) or gates_TK.shape != ids_TK.shape:
        shapes = [tuple(x.shape) for x in (x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)]
        raise StateError(f"experts: shapes {shapes}; expected [T, D], [T, K], [T, K], [E, D, 2 I], [E, I, D]")


def experts_reference(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, gate_up_EDF: Tensor, down_EID: Tensor) -> Tensor:
    """The same in plain torch: sort the pairs by expert, one grouped matmul each way, add up by token."""
    order_N, token_N, ends_E = _by_expert(ids_TK, len(gate_up_EDF))
    hidden_NF = F.grouped_mm(x_TD.index_select(0, token_N), gate_up_EDF, offs=ends_E)
    gate_NI, up_NI = hidden_NF.chunk(2, dim=-1)
    y_ND = F.grouped_mm(F.silu(gate_NI) * up_NI, down_EID, offs=ends_E)
    return _by_token(x_TD, y_ND, gates_TK, order_N, token_N)


def combine_experts(y_TKD: Tensor, ids_TK: Tensor, gates_TK: Tensor, num_experts: int) -> Tensor:
    """Σ_k gate_k · y_k: what `experts` does with the results of its experts, here of results that were computed elsewhere; the same bits.

    No gradient. Native for fp32 on the CPU with D a multiple of 8.
    """
    kernels = None if y_TKD.shape[2] % LANES else native_for(y_TKD, gates_TK, training=True)
    if kernels is None:
        y_ND, order_N = y_TKD.flatten(0, 1), ids_TK.flatten().argsort(stable=True)
        return _by_token(y_TKD[:, 0], y_ND.index_select(0, order_N), gates_TK, order_N, order_N // ids_TK.shape[1])
    y_TD = y_TKD.new_empty(y_TKD.shape[0], y_TKD.shape[2])
    inputs = [x if x.is_contiguous() else x.contiguous() for x in (y_TKD, ids_TK.long(), gates_TK)]
    pointers = [x.data_ptr() for x in (*inputs, y_TD)]
    check(kernels.combine_experts(*pointers, *ids_TK.shape, num_experts, y_TD.shape[1]), "combine_experts")
    return y_TD


def clamped_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    gates_TK: Tensor,
    gate_up_EDF: Tensor,
    gate_up_bias_EF: Tensor,
    down_EID: Tensor,
    down_bias_ED: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """`experts` with biases b and the activation min(g, limit) · sigmoid(alpha · min(g, limit)) · (1 + clamp(u, ± limit)).

    g = gate(x) + b and u = up(x) + b are in turn the columns of `gate_up` (not one half each). Differentiable; in plain torch.
    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.
    """
    _check_shapes(x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)
    order_N, token_N, ends_E = _by_expert(ids_TK, len(gate_up_EDF))
    expert_N = ids_TK.flatten().long().index_select(0, order_N)
    hidden_NF = F.grouped_mm(x_TD.index_select(0, token_N), gate_up_EDF, offs=ends_E) + gate_up_bias_EF.index_select(0, expert_N)
    gate_NI, up_NI = hidden_NF[:, 0::2].clamp(max=limit), hidden_NF[:, 1::2].clamp(-limit, limit)
    active_NI = gate_NI * torch.sigmoid(alpha * gate_NI) * (up_NI + 1)
    y_ND = F.grouped_mm(active_NI, down_EID, offs=ends_E) + down_bias_ED.index_select(0, expert_N)
    return _by_token(x_TD, y_ND, gates_TK, order_N, token_N)


def _by_expert(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pairs in the order of their experts [N], their tokens [N], one past the last pair of each expert [E])."""
    ids_N = ids_TK.flatten().long()
    order_N = ids_N.argsort(stable=True)
    return order_N, order_N // ids_TK.shape[1], torch.bincount(ids_N, minlength=num_experts).cumsum(0).int()


def _by_token(x_TD: Tensor, y_ND: Tensor, gates_TK: Tensor, order_N: Tensor, token_N: Tensor) -> Tensor:
    y_ND = y_ND * gates_TK.flatten().index_select(0, order_N).to(y_ND.dtype).unsqueeze(-1)
    return torch.zeros_like(x_TD).index_add(0, token_N, y_ND)
