"""[trainer.lora]: train low-rank adapters instead of the weights."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from slipstream.config.base import Section


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): W + (alpha / rank) · B A with W frozen. Without this table all weights train."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[str, ...] = Field(default=("all",), min_length=1)
    """Matrices that get an adapter: 'attention', 'dense' (feed-forward layers and shared experts), 'experts', 'all', or modules by
    their last name in the checkpoint, such as 'q_proj'. Each must match something."""
    path: Path | None = None
    """PEFT folder of an adapter to start from (adapter_config.json, adapter_model.safetensors). Its rank, alpha and targets must be those
    given here. None: a fresh adapter, which changes nothing yet."""
    seed: int = Field(default=0, ge=0)
    """Of the first values of a fresh adapter."""
