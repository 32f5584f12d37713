"""Which implementation runs a model: one of our families, or transformers' modules behind our seams. Torch-free for the first."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slipstream.models.spec import ModelSpec

Impl = Literal["auto", "hf"]
"""auto: our own, for the families that we have. hf: transformers'. Nothing falls back to the slower one by itself."""


def read_spec(folder: str | Path, impl: Impl) -> ModelSpec:
    """The spec of a model folder. With "hf" the modules are built without weights and looked at, which imports torch.

    Raises ModelError: no model folder, or an architecture or option that the implementation does not support.
    """
    if impl == "auto":
        return ModelSpec.from_folder(folder)
    from slipstream.models.foreign.probe import probe

    return probe(folder)
