"""What a process holds of the whole: a box of each tensor. And how the boxes of all processes become whole tensors, one at a time.

Which axis of the mesh cut a tensor, or left it to other processes, does not matter here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from slipstream.errors import StateError
from slipstream.models.tensor_file import Items
from slipstream.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Piece:
    """The box of a tensor that this process holds."""

    local: Tensor
    """Its memory: writing into it changes the tensor."""
    starts: tuple[int, ...]
    """Where it begins in the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    sharded: bool
    """Whether it is one of several by FSDP."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box that some process holds, and which one brings it."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    rank: int


def pieces(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Piece]:
    """Of parameters, gradients or moments of this process."""
    return {name: _piece(tensor.detach(), mesh) for name, tensor in tensors.items()}


def _piece(tensor: Tensor, mesh: Mesh) -> Piece:
    if not isinstance(tensor, DTensor):
        return Piece(tensor, (0,) * tensor.ndim, tuple(tensor.shape), sharded=False)
    local, whole, starts = tensor.to_local(), list(tensor.shape), [0] * tensor.ndim
    left, coordinate = list(tensor.shape), tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):  # as torch.chunk cuts: the last ones may be smaller, or empty
            size = -(-left[placement.dim] // tensor.device_mesh.size(axis))
            first = min(coordinate[axis] * size, left[placement.dim])
            starts[placement.dim] += first
            left[placement.dim] = min(size, left[placement.dim] - first)
    if tuple(left) != tuple(local.shape):
        raise StateError(f"a tensor {whole} with {tensor.placements} should have {left} here, and has {list(local.shape)}")
    if "expert_fsdp" in (tensor.device_mesh.mesh_dim_names or ()):
        starts[0] += mesh.expert_rank * whole[0]
        whole[0] *= mesh.config.ep
    return Piece(local, tuple(starts), tuple(whole), sharded=True)


def boxes(held: Mapping[str, Piece], mesh: Mesh) -> dict[str, list[Box]]:
    """Of every tensor that any process holds all boxes, each once: the lowest rank that holds it brings it. All processes call this.

    Raises StateError: boxes overlap or leave gaps.
    """
    own = {name: Box(p.starts, tuple(p.local.shape), p.whole, p.local.dtype, p.sharded, mesh.rank) for name, p in held.items()}
    found: dict[str, dict[tuple[int, ...], Box]] = {}
    for all_of_rank in mesh.exchange(own):
        for name, box in all_of_rank.items():
            if math.prod(box.sizes):
                found.setdefault(name, {}).setdefault(box.starts + box.sizes, box)
    for name, parts in found.items():
        whole = next(iter(parts.values())).whole
        if sum(math.prod(box.sizes) for box in parts.values()) != math.prod(whole):
            raise StateError(f"{name} {list(whole)} is held in boxes that do not add up to it: {list(parts.values())}")
    return {name: list(parts.values()) for name, parts in found.items()}


def stream(
    held: Mapping[str, Piece], plan: Mapping[str, Sequence[Box]], names: Iterable[str], mesh: Mesh, dtype: torch.dtype | None = None
) -> Items:
    """Tensors whole, one after the other, in the leading process; all others send it what they bring, and get nothing.

    All processes go through it with the same `names`. Sharded tensors come in `dtype`. One that is not cut is no copy. Closed early, it
    still takes what the others are sending.
    """
    left = iter(names)
    try:
        for name in left:
            tensor = _assemble(held.get(name), plan[name], mesh, dtype)
            if tensor is not None:
                yield name, tensor
    except GeneratorExit:
        for name in left:
            _assemble(held.get(name), plan[name], mesh, dtype)
        raise


def streamed_dtype(box: Box, dtype: torch.dtype | None) -> torch.dtype:
    """Of a tensor with this box, from `stream`."""
    return dtype if dtype is not None and box.sharded else box.dtype


@torch.no_grad()
def _assemble(own: Piece | None, parts: Sequence[Box], mesh: Mesh, dtype: torch.dtype | None) -> Tensor | None:
    kind = streamed_dtype(parts[0], dtype)
    if not mesh.leads:
        for box in parts:
            if box.rank == mesh.rank:
                assert own is not None
                dist.send(own.local.to(kind).contiguous(), 0)
        return None
    if len(parts) == 1 and parts[0].rank == 0:
        assert own is not None
        return own.local.to(kind)
    whole = torch.empty(parts[0].whole, dtype=kind)
    for box in parts:
        target = whole[tuple(slice(start, start + size) for start, size in zip(box.starts, box.sizes, strict=True))]
        if box.rank == 0:
            assert own is not None
            target.copy_(own.local)
        elif target.is_contiguous():
            dist.recv(target, box.rank)
        else:
            received = torch.empty_like(target, memory_format=torch.contiguous_format)
            dist.recv(received, box.rank)
            target.copy_(received)
    return whole


def gather(tensors: Mapping[str, Tensor], mesh: Mesh, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All of `tensors` whole, in the leading process only: for what is small. Elsewhere the result is empty."""
    held = pieces(tensors, mesh)
    plan = boxes(held, mesh)
    return dict(stream(held, plan, sorted(plan), mesh, dtype))
