"""The live model, and the next one being made beside it.

`prepare` may run in another thread while the live model serves: it touches only the spare model. `commit` exchanges two references. The
retired model is kept as the next spare, so the engine holds the weights at most twice and publishing allocates nothing.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from slipstream.errors import EngineError, ModelError
from slipstream.models.fill import load_hf_tensors
from slipstream.models.fp8 import empty_in_fp8, load_in_fp8, resident_bytes
from slipstream.models.hf import TensorFiles
from slipstream.models.impl import Impl
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import load_model
from slipstream.transport.weights import TENSORS_FILE, fingerprint, fingerprint_file, read_header, verify
from slipstream.types import PolicyVersion


class LiveWeights:
    """Which policy version samples, and which one is ready to."""

    def __init__(self, folder: Path, dtype: torch.dtype, number: int, impl: Impl = "auto", fp8: str | None = None) -> None:
        """Loads the model folder as version `number`. `fp8`: the kind of scales (`engine.fp8_scales`) to multiply in FP8 with, or None;
        then the matrices are held as codes alone, whatever the folder and later versions hold.

        Raises ModelError when it cannot be used.
        """
        self._power_of_two = None if fp8 is None else fp8 == "power_of_two"
        self.model: LanguageModel = self.load(folder, dtype, impl).eval().requires_grad_(False)
        self.number = number
        self.fingerprint = fingerprint_folder(folder)
        self.prepared: PolicyVersion | None = None
        self._prepared_model: LanguageModel | None = None
        self._spare: LanguageModel | None = None

    def load(self, folder: Path, dtype: torch.dtype, impl: Impl) -> LanguageModel:
        """The model of a folder. `engine.wide` has a part of it only."""
        return load_model(folder, dtype, impl=impl) if self._power_of_two is None else load_in_fp8(folder, self._power_of_two)

    def fill(self, model: LanguageModel, tensors: TensorFiles) -> None:
        """Copy the tensors of a version into a model that `load` made."""
        load_hf_tensors(model, tensors, tensors.files)

    def prepare(self, version: PolicyVersion) -> None:
        """Load and verify. The live weights, and those prepared before, stay as they are when it fails.

        Raises EngineError: the file is missing or damaged, has another fingerprint, or does not fit the model.
        """
        if version == self.prepared or (version.number == self.number and version.fingerprint == self.fingerprint):
            return
        try:
            verify(version)
            tensors = TensorFiles(version.path)
        except ModelError as error:
            raise EngineError(f"policy version {version.number} cannot be prepared: {error}") from error
        spare = self._spare or self._another()
        try:
            self.fill(spare, tensors)
        except ModelError as error:
            self._spare = spare
            raise EngineError(f"policy version {version.number} cannot be prepared: {error}") from error
        self._spare = self._prepared_model
        self._prepared_model, self.prepared = spare, version

    def commit(self, number: int) -> bool:
        """Make the prepared version live; False when it is live already.

        Raises EngineError when another version, or none, is prepared.
        """
        if number == self.number and (self.prepared is None or self.prepared.number != number):
            return False
        if self.prepared is None or self._prepared_model is None or self.prepared.number != number:
            ready = "none" if self.prepared is None else self.prepared.number
            raise EngineError(f"cannot commit policy version {number}: prepared is {ready}, live is {self.number}; prepare it first")
        self._spare, self.model = self.model, self._prepared_model
        self.number, self.fingerprint = number, self.prepared.fingerprint
        self._prepared_model = self.prepared = None
        return True

    @property
    def resident_bytes(self) -> int:
        """Memory of the weights that are live, prepared and spare."""
        return sum(resident_bytes(model) for model in (self.model, self._prepared_model, self._spare) if model is not None)

    def _another(self) -> LanguageModel:
        """A model of the same shape, to be filled."""
        if self._power_of_two is None:
            return copy.deepcopy(self.model)
        return empty_in_fp8(self.model.spec, self._power_of_two).eval()


def fingerprint_folder(folder: Path) -> str:
    """Of a model folder's tensors, in one file or in shards: for one file the same as that of a published version."""
    files = sorted(folder.glob("*.safetensors")) if not (folder / TENSORS_FILE).exists() else [folder / TENSORS_FILE]
    rows = []
    for file in files:
        _, hashes = fingerprint_file(file)
        rows += [(entry.name, entry.dtype, entry.shape, hashes[entry.name]) for entry in read_header(file)]
    return fingerprint(rows)
