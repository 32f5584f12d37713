"""The tensors of a checkpoint: a safetensors file for each process, in the form of torch.distributed.checkpoint, which reshards on load.

A file holds boxes of tensors; its header says under DCP_SHARDING_INFO where each begins in the whole. torch's `HuggingFaceStorageReader`
reads it (`torch.distributed.checkpoint.hf_storage`); torch's writer is not used, since it builds each file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slipstream.errors import ModelError, StateError
from slipstream.models.fill import check_finite
from slipstream.models.tensor_file import Kind, TensorFile, TensorStream
from slipstream.parallel.pieces import Box, Piece
from slipstream.transport.files import fsync_file, naming
from slipstream.transport.weights import fingerprint_file

Staged = Mapping[str, tuple[Tensor, tuple[int, ...]]]
"""Name to (memory that nobody changes, where it begins in the whole tensor)."""


def shard_name(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def describe(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as the manifest has them."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def stage(held: Mapping[str, Piece], plan: Mapping[str, Sequence[Box]], rank: int) -> Staged:
    """Copies of the boxes that this process brings."""
    own = {name: piece for name, piece in held.items() if any(b.rank == rank and b.starts == piece.starts for b in plan.get(name, ()))}
    return {name: (piece.local.clone(memory_format=torch.contiguous_format), piece.starts) for name, piece in own.items()}


def write_shard(path: Path, staged: Staged) -> dict[str, Any]:
    """Write, sync and read back. Returns the file's entry for the manifest, with the hash of each tensor.

    Raises OSError (a full disk among others), ModelError: what was read is not what was written.
    """
    hashes: dict[str, str] = {}
    offsets = {name: {"saved_offsets": list(starts)} for name, (_, starts) in staged.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    with naming(path), TensorFile(path, TensorStream.of({name: tensor for name, (tensor, _) in staged.items()}).kinds, metadata) as file:
        for name, (tensor, _) in staged.items():
            hashes[name] = xxhash.xxh3_128_hexdigest(file.write(name, tensor))
    fsync_file(path)
    damaged = _differing(path, hashes)
    if damaged:
        raise ModelError(f"{path} does not hold what was written to it: {', '.join(damaged[:5])} differ; check the disk")
    return {**describe(path), "tensors": hashes}


def where_damaged(path: Path, hashes: Mapping[str, str]) -> str:
    """' (tensors ...)' of a damaged file, as far as its header can still be read."""
    try:
        damaged = _differing(path, hashes)
    except ModelError:
        return ""
    more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
    return f" (tensor {', '.join(damaged[:5])}{more})" if damaged else " (its header)"


def _differing(path: Path, hashes: Mapping[str, str]) -> list[str]:
    _, found = fingerprint_file(path)
    return sorted(name for name in found.keys() | hashes.keys() if found.get(name) != hashes.get(name))


class ShardWriter:
    """Writes files in a thread, one at a time, while training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[dict[str, Any]] | None = None

    def start(self, path: Path, staged: Staged) -> None:
        """Raises StateError: the file before was never waited for."""
        if self._writing is not None:
            raise StateError(f"{path} is to be written while another checkpoint is in flight")
        self._writing = self._thread.submit(write_shard, path, staged)

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def outcome(self) -> dict[str, Any] | BaseException:
        """Waits for: the file that was started. What `write_shard` returned, or raised."""
        assert self._writing is not None
        writing, self._writing = self._writing, None
        error = writing.exception()
        return error if error is not None else writing.result()


class Stored:
    """The tensors of a checkpoint folder, whatever number of processes wrote it."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers only; hashes are `checkpoint.read`'s."""
        self.folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()

    @property
    def kinds(self) -> dict[str, Kind]:
        found = self._metadata.state_dict_metadata.items()
        return {name: (v.properties.dtype, tuple(v.size)) for name, v in found if isinstance(v, TensorStorageMetadata)}

    @torch.no_grad()
    def read(self, held: Mapping[str, Piece]) -> None:
        """Fill the pieces with their part of the tensors of the same names. Raises ModelError: a value is not finite."""
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        planner = _Planner(held, self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        for name, piece in held.items():
            check_finite(piece.local, f"tensor {name} of {self.folder}")


class _Planner(LoadPlanner):
    """Which part of which file goes where: every process plans for itself."""

    def __init__(self, held: Mapping[str, Piece], metadata: Metadata) -> None:
        self._held, self._metadata = held, metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self._held.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(piece.starts), piece.local.shape)
            items += create_read_items_for_chunk_list(name, stored, [chunk] if piece.local.numel() else [])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index: MetadataIndex = read_item.dest_index
        box = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._held[index.fqn].local[tuple(slice(start, start + size) for start, size in box)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """`resolve_tensor` gave a view: it is there."""

    def set_up_planner(self, *args: object, **kwargs: object) -> None:
        raise StateError("a plan of torch's own: `Stored.read` plans without it")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise StateError("a checkpoint holds tensors only")
