"""A whole serving step of a decoder in one native call (`kernels/decoder.c`): hidden states, KV, routing rows.

It knows shapes and pointers, not models or schedulers: whoever calls it says where each weight lies. There is no reference here because
the reference is the model's own forward pass. fp32 or bf16 on the CPU, no gradient. In bf16, matrices and cache stay as they are; what lies
between them is fp32, rounded where the model's forward pass rounds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.ops.logprobs import wide_logits
from slipstream.ops.native import LANES, check, in_large_pages, library

HEAD_COLUMNS = 256
"""As in kernels/decoder.c: tokens of a panel of the head."""
VECTORS = ("attention_norm", "qkv_bias", "q_norm", "k_norm", "out_bias", "ffn_norm")
"""Of a layer: fp32 whatever the dtype of the model."""
_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in (*VECTORS, "qkv", "out", "router", "gate_up", "down", "keys", "values")),
        ("inner", _I),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "num_experts", "top_k", "norm_top_k")),
        *((name, _I) for name in ("vocab", "positions", "num_blocks", "block_tokens", "moe_layers", "row_bytes", "kind")),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _P) for name in ("embed", "norm", "cosine", "sine", "routing", "load")),
        ("eps", _D),
        ("scale", _D),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("tokens", "positions", "slots", "table", "starts", "context")),
        *((name, _I) for name in ("count", "sequences", "table_width")),
    ]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights [in, out] of one layer, and its part of the KV cache [blocks, block tokens, kv heads, head dim]; all of one dtype."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    """[E, D, 2 I], or [D, 2 I] of a dense layer."""
    down: Tensor
    keys: Tensor
    values: Tensor
    router: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """What the kernel needs beside the shapes of the weights."""

    heads: int
    kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    norm_top_k: bool
    eps: float


class FusedDecoder:
    """Holds the pointers (and keeps what they point at alive). Build one per set of weights: of matrices it copies nothing but the head."""

    def __init__(
        self,
        sizes: FusedSizes,
        layers: Sequence[FusedLayer],
        embed_VD: Tensor,
        head_VD: Tensor,
        norm_D: Tensor,
        cos_Pd: Tensor,
        sin_Pd: Tensor,
        routing: np.ndarray,
        load_LE: np.ndarray,
        wide_head: bool = False,
    ) -> None:
        """`routing` [KV slots, MoE layers, top_k] uint8 or uint16 and `load_LE` int64 are written; no MoE layers: not wanted.

        `cos` and `sin` are fp32. `wide_head`: logits are not rounded to bf16.
        """
        kernels = library()
        assert kernels is not None
        kernels.decoder_forward.restype, kernels.decoder_forward.argtypes = ctypes.c_int, [_P, _P, _P, _P]
        kernels.logits.restype, kernels.logits.argtypes = None, [_P, _P, _P, *[_I] * 5]
        kernels.decoder_scratch.restype, kernels.decoder_scratch.argtypes = _I, [_P, _I]
        for layer in layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                in_large_pages(matrix)
        layers = [replace(layer, **{name: _floats(getattr(layer, name)) for name in VECTORS}) for layer in layers]
        norm_D = norm_D.float()
        half = embed_VD.dtype is torch.bfloat16
        self._kernels = kernels
        self._kind = int(half), int(half and not wide_head)
        """Of the head: FLOAT or BF16 of kernels/product.h, and whether logits are rounded."""
        self._alive = (layers, embed_VD, norm_D, cos_Pd, sin_Pd, routing, load_LE)
        self._layers = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        moe_layers = sum(layer.router is not None for layer in layers)
        blocks, block_tokens = layers[0].keys.shape[:2]
        wanted = routing.shape[1] > 0
        self._hidden = embed_VD.shape[1]
        self._decoder = _Decoder(
            *(len(layers), self._hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.num_experts, sizes.top_k, sizes.norm_top_k),
            *(embed_VD.shape[0], cos_Pd.shape[0], blocks, block_tokens, moe_layers, routing.dtype.itemsize, half),
            self._layers,
            *(x.data_ptr() for x in (embed_VD, norm_D, cos_Pd, sin_Pd)),
            *((routing.ctypes.data, load_LE.ctypes.data) if wanted else (None, None)),
            *(sizes.eps, sizes.head_dim**-0.5),
        )
        self._head_VD = head_VD
        self._panels: Tensor | None = None
        if len(head_VD) % LANES == 0:
            self._panels = in_large_pages(torch.cat([panel_VD.t().flatten() for panel_VD in head_VD.split(HEAD_COLUMNS)]))
        self._scratch = torch.empty(0)

    def forward(
        self,
        tokens_T: np.ndarray,
        positions_T: np.ndarray,
        slots_T: np.ndarray,
        block_table_SB: np.ndarray,
        query_starts_S1: np.ndarray,
        context_S: np.ndarray,
    ) -> Tensor:
        """Hidden states [T, D] after the final norm, fp32 with values of the weights' dtype; KV and routing rows are written.

        Dense arrays: int64 [T], and int32 for the last three, which are those of `paged_attention`.

        Raises StateError when an index lies outside its array.
        """
        count = len(tokens_T)
        need = self._kernels.decoder_scratch(ctypes.addressof(self._decoder), count)
        if self._scratch.numel() < need:
            self._scratch = torch.empty(2 * need)
        out_TD = torch.empty(count, self._hidden)
        arrays = (tokens_T, positions_T, slots_T, block_table_SB, query_starts_S1, context_S)
        step = _Step(*(x.ctypes.data for x in arrays), count, *block_table_SB.shape)
        code = self._kernels.decoder_forward(
            ctypes.addressof(self._decoder), ctypes.addressof(step), self._scratch.data_ptr(), out_TD.data_ptr()
        )
        check(code, "decoder_forward")
        return out_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """fp32 [T, V] of hidden states as `forward` returns them, bitwise independent of the other rows."""
        if self._panels is None:
            return self._odd_logits(hidden_TD)
        out_TV = torch.empty(len(hidden_TD), len(self._head_VD))
        pointers = [x.data_ptr() for x in (hidden_TD, self._panels, out_TV)]
        self._kernels.logits(*pointers, *hidden_TD.shape, len(self._head_VD), *self._kind)
        return out_TV

    def _odd_logits(self, hidden_TD: Tensor) -> Tensor:
        """Of a vocabulary that does not fill vectors. Below four rows, torch's product takes another path."""
        padded_TD = F.pad(hidden_TD, (0, 0, 0, max(0, 4 - len(hidden_TD))))
        half, rounded = self._kind
        logits_TV = (
            F.linear(padded_TD.to(self._head_VD.dtype), self._head_VD) if rounded or not half else wide_logits(padded_TD, self._head_VD)
        )
        return logits_TV[: len(hidden_TD)].float()


def can_fuse(tensors: Sequence[Tensor], feature_counts: Sequence[int], head_dim: int) -> bool:
    """Whether the kernel serves these weights: fp32 or bf16 on the CPU, dense, with counts that fill vectors, and a compiler at hand."""
    fits = all(count % LANES == 0 for count in (*feature_counts, head_dim))
    plain = all(type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.is_contiguous() for x in tensors)
    alike = {x.dtype for x in tensors} in ({torch.float32}, {torch.bfloat16})
    return fits and plain and alike and library() is not None


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _layer(layer: FusedLayer) -> _Layer:
    values = {name: None if (tensor := getattr(layer, name)) is None else tensor.data_ptr() for name in FusedLayer.__dataclass_fields__}
    return _Layer(**values, inner=layer.down.shape[-2])
