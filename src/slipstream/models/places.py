"""Where the tensors of a checkpoint lie in our parameters: the name table's views, as boxes that can be cut further.

A process that holds a part of a parameter learns from a place which part of which tensor it needs. The table is asked with tensors
without memory, so this costs nothing and holds for every entry that yields views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import StateError
from slipstream.models.names import Names
from slipstream.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of the checkpoint in one parameter of ours."""

    hf: str
    ours: str
    box: tuple[tuple[int, int], ...]
    """First and end of each dimension of ours."""
    axes: tuple[int, ...]
    """The dimension of ours that each dimension of the tensor is. The box is one element wide in the others."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return tuple(self.box[axis][1] - self.box[axis][0] for axis in self.axes)

    def of(self, whole: Tensor) -> Tensor:
        """The view of our parameter that is the checkpoint's tensor."""
        return self._turned(whole, self.box)

    def within(self, local: Tensor, starts: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]] | None:
        """What `local`, the box of our parameter that begins at `starts`, has of the tensor: a view of it, as the checkpoint lays it out,
        and which part of the checkpoint's tensor that is. None: nothing."""
        box = [(max(a, s), min(b, s + n)) for (a, b), s, n in zip(self.box, starts, local.shape, strict=True)]
        if any(a >= b for a, b in box):
            return None
        part = tuple(slice(box[axis][0] - self.box[axis][0], box[axis][1] - self.box[axis][0]) for axis in self.axes)
        return self._turned(local, [(a - s, b - s) for (a, b), s in zip(box, starts, strict=True)]), part

    def _turned(self, tensor: Tensor, box: Sequence[tuple[int, int]]) -> Tensor:
        cut = tensor[tuple(slice(a, b) if axis in self.axes else a for axis, (a, b) in enumerate(box))]
        left = sorted(self.axes)
        return cut.permute([left.index(axis) for axis in self.axes])


def places(names: Names, spec: ModelSpec, shapes: Mapping[str, Sequence[int]]) -> list[Place]:
    """Of all tensors of the parameters with these shapes (our names), in the order of the table. Raises StateError: no entry has one."""
    strides = {name: _strides(shape) for name, shape in shapes.items()}
    probes = {name: torch.empty_strided(tuple(shapes[name]), stride, device="meta") for name, stride in strides.items()}
    return [_place(ours, hf, view, strides[ours]) for ours, hf, view in names.cut(spec, probes)]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Such that an offset says at which index of every dimension it is, and a stride which dimension it belongs to."""
    base = max(shape, default=0) + 1
    return tuple(base ** (len(shape) - 1 - axis) for axis in range(len(shape)))


def _place(ours: str, hf: str, view: Tensor, strides: tuple[int, ...]) -> Place:
    unknown = set(view.stride()) - set(strides)
    if unknown:
        raise StateError(f"the name table's view {hf} of {ours} is no plain part of it: it steps by {sorted(unknown)} of {strides}")
    axes = tuple(strides.index(stride) for stride in view.stride())
    offset, box = int(view.storage_offset()), []
    for axis, stride in enumerate(strides):
        first, offset = divmod(offset, stride)
        box.append((first, first + (view.shape[axes.index(axis)] if axis in axes else 1)))
    return Place(hf, ours, tuple(box), axes)
