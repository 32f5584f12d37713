"""Policy versions on disk: weights/v000012/{model.safetensors, version.json}, and the fingerprint that identifies them.

The fingerprint is a hash over the sorted (name, dtype, shape, xxh3-128 of the raw bytes) list of the tensors, so equal weights have
equal fingerprints whatever the order or padding of the file. It is computed from the bytes in the file: an engine that verifies it
knows that what it maps is what the trainer wrote. Knows nothing of torch: the writer of the tensors is `trainer.publish`.

File format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, tensor bytes).
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from slipstream.errors import ModelError, WireError
from slipstream.types import PolicyVersion

SCHEMA = 1
TENSORS_FILE = "model.safetensors"
VERSION_FILE = "version.json"
_RETIRED = ".old-v"
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file: `start` and `end` are byte positions from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def version_folder(weights: Path, number: int) -> Path:
    """weights/v000012 for number 12."""
    return weights / f"v{number:06d}"


def list_versions(weights: Path) -> list[int]:
    """Numbers of the versions published in `weights`, ascending; [] when the folder does not exist yet."""
    try:
        names = os.listdir(weights)
    except FileNotFoundError:
        return []
    return sorted(int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdigit())


def read_version(folder: Path) -> PolicyVersion:
    """The version that `folder` says it is (nothing is hashed: see `verify`).

    Raises ModelError when version.json is missing, WireError when it does not decode.
    """
    path = folder / VERSION_FILE
    try:
        values = json.loads(path.read_bytes())
        if values["schema"] != SCHEMA:
            raise WireError(f"{path}: schema {values['schema']}; this build reads {SCHEMA}")
        number, parent = int(values["number"]), values["parent"]
        return PolicyVersion(number, str(values["fingerprint"]), None if parent is None else int(parent), str(folder))
    except FileNotFoundError:
        raise ModelError(f"{folder} is not a policy version: {VERSION_FILE} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"{path} does not decode: {error!r}; publish the version again") from None


def verify(version: PolicyVersion) -> None:
    """Hash the tensors of `version` and compare. Raises ModelError: missing, truncated, or not the weights that were published."""
    path = Path(version.path) / TENSORS_FILE
    found, _ = fingerprint_file(path)
    if found != version.fingerprint:
        raise ModelError(
            f"{path} has fingerprint {found}, but version {version.number} was published with {version.fingerprint}: "
            "the file was changed or damaged; publish the version again"
        )


def seal(temp: Path, weights: Path, number: int, parent: int | None) -> PolicyVersion:
    """Fingerprint temp/model.safetensors, write version.json beside it and rename `temp` to its final name.

    A version of that number with the same weights (a step trained again after a crash) is left alone, because an engine may be
    reading it; one with other weights is replaced. Nothing is fsynced: after a power loss a version can be made again from the
    checkpoint, and a reader verifies the hash; waiting for the disk would delay every step.
    """
    fingerprint, hashes = fingerprint_file(temp / TENSORS_FILE)
    values = {"schema": SCHEMA, "number": number, "fingerprint": fingerprint, "parent": parent, "tensors": hashes}
    (temp / VERSION_FILE).write_text(json.dumps(values))
    final = version_folder(weights, number)
    published = _published(final)
    if published is not None and published.fingerprint == fingerprint:
        shutil.rmtree(temp)
        return published
    shutil.rmtree(final, ignore_errors=True)  # it may be retired at this moment; what is left of it fails the rename
    os.rename(temp, final)
    return PolicyVersion(number, fingerprint, parent, str(final))


def retire(weights: Path, oldest: int) -> None:
    """Delete the versions below `oldest`. Each disappears at once; a reader that has a file of it open keeps the bytes.

    The trainer may publish one of them again meanwhile (a step trained again after a crash).
    """
    for number in list_versions(weights):
        if number < oldest:
            with contextlib.suppress(FileNotFoundError):
                os.rename(version_folder(weights, number), weights / f"{_RETIRED}{number}-{time.monotonic_ns()}")
    for folder in weights.glob(f"{_RETIRED}*"):
        shutil.rmtree(folder, onerror=_unless_gone)


def _unless_gone(_function: object, _path: str, info: Any) -> None:
    """The trainer may be deleting the same folder: it had begun to replace the version when it was renamed."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _published(folder: Path) -> PolicyVersion | None:
    """What is published in `folder`; None for nothing, or nothing readable (a power loss while it was written)."""
    try:
        return read_version(folder)
    except (ModelError, WireError):
        return None


def fingerprint_file(path: Path) -> tuple[str, dict[str, str]]:
    """(fingerprint, {tensor name: xxh3-128 of its bytes}) of a safetensors file.

    Raises ModelError when the file is missing, truncated or malformed.
    """
    entries = read_header(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        hashes = {}
        for entry in entries:
            with view[entry.start : entry.end] as raw:
                hashes[entry.name] = xxhash.xxh3_128_hexdigest(raw)
    return fingerprint([(e.name, e.dtype, e.shape, hashes[e.name]) for e in entries]), hashes


def fingerprint(tensors: list[tuple[str, str, tuple[int, ...], str]]) -> str:
    """32 hex digits over the sorted (name, safetensors dtype, shape, hash of the bytes) list."""
    rows: list[Any] = [[name, dtype, list(shape), digest] for name, dtype, shape, digest in sorted(tensors)]
    return xxhash.xxh3_128_hexdigest(json.dumps(rows, separators=(",", ":")).encode())


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file by name, checked to fit the file exactly. Raises ModelError naming the file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if size >= 8 + length else None
        if header is None:
            raise ModelError(f"{path} is truncated: {size} bytes, its header alone needs {8 + length}")
        entries = [_entry(name, 8 + length, **values) for name, values in sorted(header.items()) if name != "__metadata__"]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error!r}") from None
    expected = max((entry.end for entry in entries), default=8 + length)
    if size != expected:
        raise ModelError(f"{path} is {'truncated' if size < expected else 'too long'}: {size} bytes, its header describes {expected}")
    return entries


def _entry(name: str, base: int, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorEntry:
    start, end = data_offsets
    if not 0 <= start <= end or end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r} ({dtype} {shape}) does not fit its {end - start} bytes")
    return TensorEntry(name, dtype, tuple(shape), base + start, base + end)
