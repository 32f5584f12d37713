"""The weights and moments of all trainer processes, in and out: from a model folder, to policy versions, to and from checkpoints.

Every process holds pieces; nothing here makes more than one tensor whole at a time. All processes call every function together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.fill import fill, listed
from slipstream.models.hf import TensorFiles
from slipstream.models.language_model import LanguageModel
from slipstream.models.places import Place, places
from slipstream.models.tensor_file import Items, TensorStream
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.pieces import Box, Piece, pieces, stream, streamed_dtype
from slipstream.trainer.optim import empty_optimizer_tensors, optimizer_tensors
from slipstream.trainer.shards import Stored

MODEL = "model/"
"""Weights are stored as MODEL + our name, moments as '<state>/<our name>'."""


class Layout:
    """Which tensors the whole model has, here or elsewhere. Made before the model is cut."""

    def __init__(self, model: LanguageModel, mesh: Mesh) -> None:
        self.spec, self.tied, self.mesh = model.spec, model.tied_names, mesh
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.table: Sequence[Place] = places(model.names, model.spec, self.shapes)

    def load(self, model: LanguageModel, folder: Path) -> None:
        """Fill what this process holds from an HF folder. Raises ModelError, see `models.fill`."""
        held = {name: [(piece.local, piece.starts)] for name, piece in self.weights(model).items()}

        def read() -> None:
            tensors = TensorFiles(folder)
            fill(held, self.table, self.spec, self.tied, tensors, tensors.files)

        self._together(read)

    def weights(self, model: LanguageModel) -> dict[str, Piece]:
        return pieces(dict(model.named_parameters()), self.mesh)

    def export(self, model: LanguageModel, plan: Mapping[str, Sequence[Box]], dtype: torch.dtype | None = None) -> TensorStream:
        """The weights under HF names, sharded ones in `dtype`, in the leading process; others go through the same stream and get nothing.

        `plan` is the `boxes` of the weights.
        """
        held = self.weights(model)
        by_parameter = {ours: list(found) for ours, found in groupby(self.table, lambda place: place.ours)}
        kinds = {place.hf: (streamed_dtype(plan[place.ours][0], dtype), place.shape) for place in self.table}

        def items() -> Items:
            with closing(stream(held, plan, by_parameter, self.mesh, dtype)) as wholes:
                for ours, whole in wholes:
                    for place in by_parameter[ours]:
                        yield place.hf, place.of(whole).contiguous()

        return TensorStream(kinds, items)

    def state(self, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Piece]:
        """What a checkpoint stores: `trained` (the weights, or adapters) and moments."""
        weights = {MODEL + name: piece for name, piece in pieces(trained, self.mesh).items()}
        return weights | pieces(optimizer_tensors(optimizer, names), self.mesh)

    def restore(self, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], stored: Stored) -> None:
        """Fill what `state` has from a checkpoint. Raises ModelError, before anything is changed: it is of another model; afterwards: a
        value is not finite."""

        def read() -> None:
            own = pieces(trained, self.mesh)
            weights_train = own.keys() <= self.shapes.keys()  # adapters have names and shapes of their own
            self._check(stored, self.shapes if weights_train else {name: piece.whole for name, piece in own.items()})
            moments = {name: kind for name, kind in stored.kinds.items() if not name.startswith(MODEL)}
            empty = empty_optimizer_tensors(optimizer, names, moments)
            stored.read({MODEL + name: piece for name, piece in own.items()} | pieces(empty, self.mesh))

        self._together(read)

    def _check(self, stored: Stored, shapes: Mapping[str, tuple[int, ...]]) -> None:
        kinds, expected = stored.kinds, {MODEL + name: shape for name, shape in shapes.items()}
        problems = [f"tensor {name} is missing" for name in expected.keys() - kinds.keys()]
        for name, (_, shape) in kinds.items():
            wanted = expected.get(name) if name.startswith(MODEL) else shapes.get(name.partition("/")[2])
            if wanted is None:
                problems.append(f"tensor {name} is unexpected")
            elif shape != wanted and (shape or name.startswith(MODEL)):
                problems.append(f"tensor {name} has shape {list(shape)}, but the model's is {list(wanted)}")
        if problems:
            problems.sort(key=lambda text: (f"tensor {MODEL}" not in text, text))  # weights before moments
            raise ModelError(f"checkpoint {stored.folder} does not fit the {self.spec.family} model: {listed(problems)}")

    def _together(self, read: Callable[[], None]) -> None:
        """What one process cannot read, none goes on without: all raise the first one's ModelError."""
        problem = ""
        try:
            read()
        except ModelError as error:
            problem = str(error)
        for found in self.mesh.exchange(problem):
            if found:
                raise ModelError(found)
