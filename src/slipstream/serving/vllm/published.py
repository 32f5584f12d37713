"""Whether a published version is what it says it is, and fits the model that the engine was started with. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import EngineError, ModelError
from slipstream.transport.weights import TENSORS_FILE, read_header, verify
from slipstream.types import PolicyVersion


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a model folder, in one file or in shards. Raises ModelError."""
    return {entry.name: entry.shape for file in sorted(folder.glob("*.safetensors")) for entry in read_header(file)}


def verify_fits(version: PolicyVersion, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises EngineError: missing, damaged, another fingerprint, or tensors of another name or shape than `shapes`."""
    try:
        found = {entry.name: entry.shape for entry in read_header(Path(version.path) / TENSORS_FILE)}
        verify(version)
    except ModelError as error:
        raise EngineError(f"policy version {version.number} cannot be prepared: {error}") from error
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise EngineError(
            f"policy version {version.number} cannot be prepared: {len(wrong)} tensors do not fit, such as {name}: "
            f"{found.get(name, 'missing')} in the version, {shapes.get(name, 'none')} in the model"
        )
