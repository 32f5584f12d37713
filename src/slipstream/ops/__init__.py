"""Kernels. Each has a reference in plain torch and chooses by itself: the native C version (`kernels/*.c`, compiled at first use)
serves fp32 on the CPU, with and without gradients; other dtypes (bf16, but for `fused`), other devices and odd sizes take the reference.
Native results do not depend on the rest of the batch, and `paged_attention` has no gradient.
"""

from slipstream.ops.attention import DocLayout, Sight, doc_attention, paged_attention, write_kv
from slipstream.ops.experts import clamped_experts, combine_experts, experts
from slipstream.ops.indexer import doc_index, paged_index, write_index
from slipstream.ops.logprobs import token_logprobs
from slipstream.ops.norm import rms_norm
from slipstream.ops.rope import rope

__all__ = [
    "DocLayout",
    "Sight",
    "clamped_experts",
    "combine_experts",
    "doc_attention",
    "doc_index",
    "experts",
    "paged_attention",
    "paged_index",
    "rms_norm",
    "rope",
    "token_logprobs",
    "write_index",
    "write_kv",
]
