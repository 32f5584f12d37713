"""Whether the KV pool holds what a run needs: arithmetic on the model's shape and the configuration, without torch."""

from __future__ import annotations

import struct

from slipstream.config.serve import EngineConfig
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec

MIB = 1 << 20
MIN_BLOCKS = 2
SCALE_FEATURES = 128
"""Features of a head that share a scale in an FP8 cache; a scale is a byte (`ops.fp8_kv`)."""
VERSION_BYTES = 4
"""Behind the routing rows of a block that leaves the device: the policy version that wrote it (`engine.blocks`)."""
HEADER = struct.Struct("<4sIQ16s16s16s")
HEADER_BYTES = HEADER.size + 8
"""Before it where it is kept in a file, checksum included."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8": 2}


def routing_item_bytes(spec: ModelSpec) -> int:
    """Bytes of one expert id in a routing row."""
    return 1 if spec.num_experts <= 256 else 2


def block_bytes(spec: ModelSpec, block_tokens: int, item_bytes: int, capture: bool, fp8: bool = False) -> int:
    """Bytes of one KV block over all layers: keys, values, index keys of sparse attention, and with `capture` the routing rows.

    `fp8`: keys and values are a byte each and have scales; index keys are not, they stay as they are.
    """
    head_bytes = spec.head_dim - (-spec.head_dim // SCALE_FEATURES) if fp8 else spec.head_dim * item_bytes
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * head_bytes
    if spec.indexer is not None:
        token_bytes += len(spec.index_layers) * spec.indexer.head_dim * item_bytes
    if capture:
        token_bytes += len(spec.moe_layers) * spec.top_k * routing_item_bytes(spec)
    return token_bytes * block_tokens


def block_bytes_of(spec: ModelSpec, config: EngineConfig) -> int:
    """`block_bytes` as [engine] says."""
    return block_bytes(spec, config.block_tokens, _ITEM_BYTES[config.dtype], config.capture_routing, fp8=config.kv_dtype == "float8")


def num_blocks(spec: ModelSpec, config: EngineConfig) -> int:
    """Blocks of the pool."""
    return config.kv_memory_mib * MIB // block_bytes_of(spec, config)


def check_room(spec: ModelSpec, config: EngineConfig, seq_len: int) -> None:
    """Refuse a pool that cannot hold one sequence of `seq_len` tokens: it would fail whenever one grows that long. Raises ConfigError."""
    size = block_bytes_of(spec, config)
    needed = max(MIN_BLOCKS, -(-(seq_len - 1) // config.block_tokens))  # the last token is sampled, never processed
    if num_blocks(spec, config) < needed:
        smallest = -(-needed * size // MIB)
        raise ConfigError(
            f"engine.kv_memory_mib = {config.kv_memory_mib} and model.seq_len = {seq_len}: one sequence of that length needs {needed} KV "
            f"blocks of {size / 1024:.1f} KiB; use engine.kv_memory_mib = {smallest} or more, or a smaller model.seq_len"
        )
