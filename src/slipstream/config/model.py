"""[model]: the policy, shared by the trainer and the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from slipstream.config.base import Section


class ModelConfig(Section):
    """Which policy to train and serve."""

    path: Path
    """An ordinary HF folder: config.json, *.safetensors, tokenizer.json with a chat template."""
    impl: Literal["auto", "hf"] = "auto"
    """auto: slipstream's own modules, for the families that it has. hf: transformers' modules with slipstream's attention, experts and
    router seams, for any architecture that has nothing else to honour; slower, and on one trainer process (docs/models.md)."""
    seq_len: int = Field(default=1024, ge=2)
    """Longest sequence in tokens (prompt + everything sampled). The engine's context and a limit on every sample."""
