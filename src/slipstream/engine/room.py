"""Whether the KV pool holds what a run needs: arithmetic on the model's shape and the configuration, without torch."""

from __future__ import annotations

from slipstream.config.serve import EngineConfig
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec

MIB = 1 << 20
MIN_BLOCKS = 2
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8": 2}


def routing_item_bytes(spec: ModelSpec) -> int:
    """Bytes of one expert id in a routing row."""
    return 1 if spec.num_experts <= 256 else 2


def block_bytes(spec: ModelSpec, block_tokens: int, item_bytes: int, capture: bool) -> int:
    """Bytes of one KV block over all layers: keys, values, index keys of sparse attention, and with `capture` the routing rows."""
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * item_bytes
    if spec.indexer is not None:
        token_bytes += len(spec.index_layers) * spec.indexer.head_dim * item_bytes
    if capture:
        token_bytes += len(spec.moe_layers) * spec.top_k * routing_item_bytes(spec)
    return token_bytes * block_tokens


def check_room(spec: ModelSpec, config: EngineConfig, seq_len: int) -> None:
    """Refuse a pool that cannot hold one sequence of `seq_len` tokens: it would fail whenever one grows that long. Raises ConfigError."""
    size = block_bytes(spec, config.block_tokens, _ITEM_BYTES[config.dtype], config.capture_routing)
    needed = max(MIN_BLOCKS, -(-(seq_len - 1) // config.block_tokens))  # the last token is sampled, never processed
    if config.kv_memory_mib * MIB // size < needed:
        smallest = -(-needed * size // MIB)
        raise ConfigError(
            f"engine.kv_memory_mib = {config.kv_memory_mib} and model.seq_len = {seq_len}: one sequence of that length needs {needed} KV "
            f"blocks of {size / MIB:.2f} MiB; use engine.kv_memory_mib = {smallest} or more, or a smaller model.seq_len"
        )
