"""Write a safetensors file tensor by tensor: its header needs names, types and shapes only, so no more than one tensor is in memory.

The bytes are those that the library writes for the same tensors. Format: https://huggingface.co/docs/safetensors (8-byte little-endian
length of the header, JSON header, tensor bytes).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from slipstream.errors import StateError

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""
Items = Generator[tuple[str, Tensor], None, None]

_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order in which the library lays them out: large elements first."""
_ORDER = {dtype: number for number, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True)
class TensorStream:
    """Named tensors that come one at a time, while what they will be is known before."""

    kinds: Mapping[str, Kind]
    items: Callable[[], Items]
    """Each of `kinds` once, in that order. Who stops early closes it: other processes may be sending the rest."""

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> TensorStream:
        """Of tensors that are there already."""
        return TensorStream({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, lambda: _items(tensors))

    def then(self, other: TensorStream) -> TensorStream:
        """This one, followed by `other`."""
        return TensorStream({**self.kinds, **other.kinds}, lambda: _chain(self, other))


def _items(tensors: Mapping[str, Tensor]) -> Items:
    yield from tensors.items()


def _chain(*streams: TensorStream) -> Items:
    for stream in streams:
        yield from stream.items()


def num_bytes(kind: Kind) -> int:
    dtype, shape = kind
    return math.prod(shape) * dtype.itemsize


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A new file for tensors of these kinds; each is written once, in any order. Use as a context manager.

    It gets its name on leaving the block, so a file of that name may be mapped, and read, until then. Every tensor must have been written.
    Raises OSError, like any other file.
    """

    def __init__(self, path: Path, kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._starts: dict[str, int] = {}
        end = 0
        for name in sorted(kinds, key=lambda name: (_ORDER[kinds[name][0]], name)):
            dtype, shape = kinds[name]
            self._starts[name], end = end, end + num_bytes(kinds[name])
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [self._starts[name], end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._kinds, self._base = dict(kinds), 8 + len(text)
        self._path, self._temp = path, path.with_name(f".tmp-{path.name}")
        self._file = open(self._temp, "wb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._write(0, len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> memoryview:
        """Returns the bytes that were written."""
        kind = (tensor.dtype, tuple(tensor.shape))
        if self._kinds.pop(name, None) != kind:
            raise StateError(f"tensor {name} {kind} was not announced to the file, or is in it already")
        data = raw(tensor)
        self._write(self._base + self._starts[name], data)
        return data

    def _write(self, start: int, data: bytes | memoryview) -> None:
        self._file.seek(start)
        with memoryview(data) as left:
            done = 0
            while done < len(left):  # one call writes 2 GiB at most
                done += self._file.write(left[done:]) or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if kind is None and not self._kinds:
            self._temp.replace(self._path)
            return
        self._temp.unlink()
        if kind is None:
            raise StateError(f"tensors were announced to a file and never written: {sorted(self._kinds)[:5]}")


def cut_off(path: Path) -> list[str]:
    """Tensors that the header of a safetensors file announces and that the file is too short for; [] when the header itself is gone."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        room = path.stat().st_size - 8 - length
        return [name for name, values in header.items() if name != "__metadata__" and values["data_offsets"][1] > room]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return []
