"""Typed access to config.json: values of the right kind, or an error that says which one is not. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import ModelError


class Reader:
    """Typed access to the keys of one config object; every error names the file, the key and the value."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is present, as a positive integer."""
        value = self.first(*keys, default=default)
        if value is None:
            raise ModelError(f"{self.source}: {keys[0]} is missing; it is required for model_type {self.config.get('model_type')!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.source}: {keys[0]} = {value!r}; expected a positive integer")
        return value

    def count(self, *keys: str, default: int = 0) -> int:
        """The first of `keys` that is present, as an integer that may be 0."""
        value = self.first(*keys, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"{self.source}: {keys[0]} = {value!r}; expected an integer of at least 0")
        return value

    def first(self, *keys: str, default: Any) -> Any:
        """The value of the first of `keys` that is present and not null."""
        return next((self.config[key] for key in keys if self.config.get(key) is not None), default)

    def real(self, value: Any, key: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.source}: {key} = {value!r}; expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.source}: {key} = {value!r}; expected true or false")
        return default if value is None else value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, or one; nothing reads as ()."""
        value = self.config.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise ModelError(f"{self.source}: {key} = {value!r}; expected an integer or a list of integers")
        return tuple(items)

    def refuse_unless(self, key: str, accepts: Callable[[Any], bool], implemented: str) -> None:
        value = self.config.get(key)
        if not accepts(value):
            raise ModelError(f"{self.source}: {key} = {value!r} is not supported; slipstream implements {key} = {implemented} only")

    def refuse_quantised(self) -> None:
        """Raises ModelError: weights quantised in another way than block-scaled FP8."""
        plain = "null (weights in float32, bfloat16 or float16: see docs/models.md for how to convert)"
        block = "{'quant_method': 'fp8', 'weight_block_size': [128, 128]}"
        self.refuse_unless("quantization_config", lambda value: off(value) or _block_fp8(value), f"{plain}, or {block}")


def _block_fp8(value: Any) -> bool:
    """Weights in E4M3 with a float32 scale for each block (see `models.matrices`); how activations are quantised concerns an engine."""
    kind = (value.get("quant_method"), value.get("fmt", "e4m3"), value.get("weight_block_size")) if isinstance(value, dict) else ()
    return kind == ("fp8", "e4m3", [128, 128])


def off(value: Any) -> bool:
    """Whether the value of an option says that it is not used."""
    return value is None or value is False or value == 0 or value == {}
