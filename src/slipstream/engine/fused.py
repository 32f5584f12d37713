"""Binds a decoder and the KV cache to the fused serving kernel (`ops.fused`), where the kernel can serve them.

The model's own forward pass is what this must equal; it serves FP8, odd sizes and machines without a compiler. Tests hold one to the
other.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.kv import KvCache
from slipstream.models.decoder import Decoder
from slipstream.models.language_model import LanguageModel
from slipstream.models.layers import Attention, Block, DenseFFN, Experts, MoE
from slipstream.models.rotary import rope_tables
from slipstream.models.spec import ModelSpec
from slipstream.ops.fp8_kv import Fp8Pages
from slipstream.ops.fused import FusedDecoder, FusedLayer, FusedSizes, can_fuse

MAX_MATRIX_BYTES = {torch.float32: 2 << 20, torch.bfloat16: 4 << 20}
"""Above this, torch's packed products are faster than the kernel's by more than its calls cost.

float32: 0.7x at 576 x 3072 and 32 rows; equal at 256 x 1024 (AMD Zen 1, MKL). bfloat16, where torch packs the weights in every call: at 1,
8, 32, 128 and 512 rows, torch takes 4.1, 3.4, 1.4, 0.85 and 0.66 times the kernel's time for a feed-forward network of 576 x 3072, and 2.2,
1.8, 1.05, 0.62 and 0.58 times for one of 1024 x 6144 (AMD Zen 4)."""

SERVED = frozenset(
    {
        *("family", "vocab_size", "hidden", "intermediate", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rms_eps"),
        *("max_positions", "rope_theta", "yarn"),  # all of them in the tables of angles
        *("tie_embeddings", "qkv_bias", "out_bias", "qk_norm"),
        *("moe_layers", "num_experts", "top_k", "expert_intermediate", "norm_top_k"),
        *("prediction_layers", "eos_ids", "dtype"),  # nothing to compute; a type that the kernel does not know is refused by `can_fuse`
    }
)
"""Fields of `ModelSpec` that the kernel serves whatever they are. It knows softmax routing over all experts, and plain heads: normed one by
one, rotated whole, seeing all of their past."""


def bind(model: LanguageModel, cache: KvCache, load_LE: np.ndarray, wide_head: bool = False) -> FusedDecoder | None:
    """None: this model, or a cache in FP8, needs the model's own forward pass.

    `load_LE` is counted up by every step. `wide_head`: logits are not rounded to the type of the model.
    """
    if not isinstance(model, Decoder) or any("forward" in vars(module) for module in model.modules()):
        return None  # no model of ours, or one in which a part was replaced from outside: shared experts
    if isinstance(cache.keys[0], Fp8Pages) or cache.keys[0].dtype is not model.dtype:
        return None
    spec = model.spec
    counts = [spec.hidden, *((spec.num_experts, spec.expert_intermediate) if spec.moe_layers else ())]
    if len(spec.moe_layers) < spec.num_layers:
        counts.append(spec.intermediate)
    if (
        not _is_plain(spec)
        or _largest_matrix(model) > MAX_MATRIX_BYTES.get(model.dtype, 0)
        or not can_fuse([*model.parameters()], counts, spec.head_dim)
    ):
        return None
    layers = [_layer(block, cache, i) for i, block in enumerate(model.layers) if isinstance(block, Block)]
    cos_Pd, sin_Pd = _rope_tables(spec, model.dtype)
    sizes = FusedSizes(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_experts, spec.top_k, spec.norm_top_k, spec.rms_eps)
    head = model.head_weight
    return FusedDecoder(sizes, layers, model.embed, head, model.norm, cos_Pd, sin_Pd, cache.routing, load_LE, wide_head)


def _is_plain(spec: ModelSpec) -> bool:
    """Whether the architecture has nothing that the kernel does not know: an option that is added to `ModelSpec` later is refused here."""
    return all(getattr(spec, option.name) == option.default for option in fields(spec) if option.name not in SERVED)


def _largest_matrix(model: Decoder) -> int:
    """Bytes of the largest matrix of any layer; an expert's counts by itself."""
    return max(p.nbytes // (len(p) if p.dim() == 3 else 1) for p in model.layers.parameters())


@lru_cache(maxsize=2)
def _rope_tables(spec: ModelSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp32, rounded as the model's own. The same for every set of weights: a commit must not wait for them."""
    cos_Pd, sin_Pd = rope_tables(spec, dtype, "cpu")
    return cos_Pd.float(), sin_Pd.float()


def _layer(block: Block, cache: KvCache, index: int) -> FusedLayer:
    attention, ffn = block.attention, block.ffn
    assert isinstance(attention, Attention)
    weights = ffn.experts if isinstance(ffn, MoE) else ffn
    keys, values = cache.keys[index], cache.values[index]
    assert isinstance(weights, Experts | DenseFFN) and isinstance(keys, Tensor) and isinstance(values, Tensor)
    return FusedLayer(
        attention_norm=block.attention_norm,
        qkv=attention.qkv,
        out=attention.out,
        ffn_norm=block.ffn_norm,
        gate_up=weights.gate_up,
        down=weights.down,
        keys=keys,
        values=values,
        router=ffn.router if isinstance(ffn, MoE) else None,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        qkv_bias=attention.qkv_bias,
        out_bias=attention.out_bias,
    )
