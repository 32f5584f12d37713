"""The expert feed-forward networks of a Mixture-of-Experts layer, without dropping tokens.

It does not choose experts: ids and gate weights come in. Shapes: T tokens, K experts per token, E experts, D hidden features,
I expert features, F = 2 I (gate first, then up), N = T K (token, expert) pairs sorted by expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import StateError
from slipstream.ops.native import LANES, check, native_for


def experts(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, gate_up_EDF: Tensor, down_EID: Tensor) -> Tensor:
    """y = Σ_k gate_k · down[id_k]( silu(gate[id_k](x)) · up[id_k](x) ).

    `ids` are integers in 0..E-1, `gates` any weights (need not sum to 1). Differentiable in x, gates and both weights.
    Native for D and I multiples of 8.
    """
    _check_shapes(x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)
    kernels = native_for(x_TD, gates_TK, gate_up_EDF, down_EID)
    num_experts, inner, dim = down_EID.shape
    if kernels is None or dim % LANES or inner % LANES or not (gate_up_EDF.is_contiguous() and down_EID.is_contiguous()):
        return experts_reference(x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)
    x_TD, ids_TK, gates_TK = x_TD.contiguous(), ids_TK.long().contiguous(), gates_TK.contiguous()
    tokens, top_k = ids_TK.shape
    y_TD = torch.empty_like(x_TD)
    pointers = [x.data_ptr() for x in (x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID, y_TD)]
    check(kernels.experts(*pointers, tokens, top_k, num_experts, dim, inner), "experts")
    return y_TD


def _check_shapes(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, gate_up_EDF: Tensor, down_EID: Tensor) -> None:
    num_experts, inner, dim = down_EID.shape
    if gate_up_EDF.shape != (num_experts, dim, 2 * inner) or x_TD.shape != (len(ids_TK), dim) or gates_TK.shape != ids_TK.shape:
        shapes = [tuple(x.shape) for x in (x_TD, ids_TK, gates_TK, gate_up_EDF, down_EID)]
        raise StateError(f"experts: shapes {shapes}; expected [T, D], [T, K], [T, K], [E, D, 2 I], [E, I, D]")


def experts_reference(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, gate_up_EDF: Tensor, down_EID: Tensor) -> Tensor:
    """The same in plain torch: sort the pairs by expert, one grouped matmul each way, add up by token."""
    num_experts, top_k = gate_up_EDF.shape[0], ids_TK.shape[1]
    ids_N = ids_TK.flatten().long()
    order_N = ids_N.argsort(stable=True)
    token_N = order_N // top_k
    ends_E = torch.bincount(ids_N, minlength=num_experts).cumsum(0).int()
    hidden_NF = F.grouped_mm(x_TD.index_select(0, token_N), gate_up_EDF, offs=ends_E)
    gate_NI, up_NI = hidden_NF.chunk(2, dim=-1)
    y_ND = F.grouped_mm(F.silu(gate_NI) * up_NI, down_EID, offs=ends_E)
    y_ND = y_ND * gates_TK.flatten().index_select(0, order_N).to(y_ND.dtype).unsqueeze(-1)
    return torch.zeros_like(x_TD).index_add(0, token_N, y_ND)
