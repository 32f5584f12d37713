"""Whether the embedded engine can serve a model as [engine] asks. Torch-free: refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slipstream.config.serve import EngineConfig
from slipstream.engine.room import VERSION_BYTES, block_bytes_of, check_room
from slipstream.engine.tiers.fit import check_sizes
from slipstream.engine.wide.fit import check_wide
from slipstream.errors import ConfigError
from slipstream.models.spec import ModelSpec


def engine_checks(spec: ModelSpec, config: EngineConfig, seq_len: int, impl: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is looked at, and a call that raises ConfigError with the keys, their values and what would fit."""
    yield "arithmetic of the engine", lambda: check_impl(config, impl)
    yield "experts of the engine", lambda: check_wide(spec, config, impl)
    yield "KV cache", lambda: check_room(spec, config, seq_len)
    yield "KV tiers", lambda: check_sizes(config.tiers, block_bytes_of(spec, config) + VERSION_BYTES)


def check_engine(spec: ModelSpec, config: EngineConfig, seq_len: int, impl: str) -> None:
    """All of them, and the length. Raises ConfigError: the first that fails."""
    check_positions(spec, seq_len)
    for _, check in engine_checks(spec, config, seq_len, impl):
        check()


def check_positions(spec: ModelSpec, seq_len: int) -> None:
    """Raises ConfigError: sequences longer than the model was made for, or too short to sample."""
    if seq_len < 2:
        raise ConfigError(f"model.seq_len = {seq_len}: a context holds at least one token of prompt and one sampled; use 2 or more")
    if seq_len > spec.max_positions:
        raise ConfigError(
            f"model.seq_len = {seq_len} and max_position_embeddings = {spec.max_positions} of the model: it was not made for sequences "
            "that long; lower model.seq_len"
        )


def check_impl(config: EngineConfig, impl: str) -> None:
    """Raises ConfigError: FP8 of matrices that nobody knows."""
    if config.dtype == "float8" and impl == "hf":
        raise ConfigError(
            'engine.dtype = "float8" and model.impl = "hf": the precision map knows our own matrices only; set engine.dtype = "bfloat16" '
            'or "float32"'
        )
