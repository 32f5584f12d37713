"""Binds a decoder and the KV cache to the fused serving kernel (`ops.fused`), where the kernel can serve them.

The model's own forward pass is what this must equal; it serves bf16, odd sizes and machines without a compiler. Tests hold one to the
other.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.kv import KvCache
from slipstream.models.decoder import Decoder
from slipstream.models.layers import Attention, Block, DenseFFN, Experts, MoE
from slipstream.models.rotary import rope_tables
from slipstream.models.spec import ModelSpec
from slipstream.ops.fused import FusedDecoder, FusedLayer, FusedSizes, can_fuse

MAX_MATRIX_BYTES = 2 << 20
"""Above this, torch's packed products are faster than the kernel's by more than its calls cost (0.7x at 576 x 3072 and 32 rows; equal at
256 x 1024: AMD Zen 1, MKL)."""


def bind(model: Decoder, cache: KvCache, load_LE: np.ndarray) -> FusedDecoder | None:
    """None: this model needs its own forward pass. `load_LE` is counted up by every step."""
    spec = model.spec
    counts = [spec.hidden, *((spec.num_experts, spec.expert_intermediate) if spec.moe_layers else ())]
    if len(spec.moe_layers) < spec.num_layers:
        counts.append(spec.intermediate)
    if (
        spec.router_score != "softmax"
        or spec.shared_intermediate
        or spec.rotary_factor != 1
        or spec.latent is not None
        or spec.qk_norm_joint
        or spec.clamped is not None
        or spec.router_logit_bias
        or spec.sinks
        or spec.window_layers
    ):
        # the kernel knows softmax routing over all experts without biases, no shared expert, and plain heads: normed one by one, rotated
        # whole, seeing all of their past
        return None
    if _largest_matrix(model) > MAX_MATRIX_BYTES or not can_fuse([*model.parameters()], counts, spec.head_dim):
        return None
    layers = [_layer(block, cache, i) for i, block in enumerate(model.layers) if isinstance(block, Block)]
    cos_Pd, sin_Pd = _rope_tables(spec)
    sizes = FusedSizes(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_experts, spec.top_k, spec.norm_top_k, spec.rms_eps)
    return FusedDecoder(sizes, layers, model.embed, model.head_weight, model.norm, cos_Pd, sin_Pd, cache.routing, load_LE)


def _largest_matrix(model: Decoder) -> int:
    """Bytes of the largest matrix of any layer; an expert's counts by itself."""
    return max(p.nbytes // (len(p) if p.dim() == 3 else 1) for p in model.layers.parameters())


@lru_cache(maxsize=2)
def _rope_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """The same for every set of weights: a commit must not wait for them."""
    return rope_tables(spec, torch.float32, "cpu")


def _layer(block: Block, cache: KvCache, index: int) -> FusedLayer:
    attention, ffn = block.attention, block.ffn
    assert isinstance(attention, Attention)
    weights = ffn.experts if isinstance(ffn, MoE) else ffn
    assert isinstance(weights, Experts | DenseFFN)
    return FusedLayer(
        attention_norm=block.attention_norm,
        qkv=attention.qkv,
        out=attention.out,
        ffn_norm=block.ffn_norm,
        gate_up=weights.gate_up,
        down=weights.down,
        keys=cache.keys[index],
        values=cache.values[index],
        router=ffn.router if isinstance(ffn, MoE) else None,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        qkv_bias=attention.qkv_bias,
        out_bias=attention.out_bias,
    )
