"""Where a tier keeps blocks outside the process: the port (`BlockStore`), and a folder behind it.

A folder store names a file after all that decides its content, so that nobody has to read a file to know whether it is of use, and writers
that do the same work write the same file:

    <path>/<shape>/<first two digits of the key>/<key>.<version>.<weights>.kv        header, payload: see `engine.blocks`

A file appears whole (written beside, then renamed) and never changes; there are no locks, and times are not compared. Every read is checked
against the checksum and the label. Another store, such as Mooncake, is one class with the four methods of the port.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from slipstream.engine.blocks import Label, Payload, open_sealed, seal
from slipstream.engine.room import HEADER_BYTES
from slipstream.engine.tiers.index import Place
from slipstream.errors import ConfigError, WireError

_SUFFIX = ".kv"
_KEY_DIGITS, _WEIGHTS_DIGITS = 32, 16


class BlockStore(Protocol):
    """Blocks of one shape by key and place. Called by threads of the hierarchy; may block. Methods raise OSError when the store fails."""

    def scan(self) -> list[tuple[bytes, Place]]:
        """Every block of this shape, the longest unused first where the store knows. A key may have several places."""
        ...

    def read(self, key: bytes, place: Place) -> np.ndarray:
        """The payload, checked. Raises WireError when it is damaged or somebody else's, FileNotFoundError when it is gone."""
        ...

    def write(self, label: Label, version: int, payload: Payload) -> None:
        """All of it or nothing; a block that is there already may be left as it is."""
        ...

    def remove(self, key: bytes, place: Place) -> None:
        """Nothing when it is gone."""
        ...


class FolderStore:
    """Blocks of `shape` in files under `path`."""

    def __init__(self, path: Path, shape: bytes, block_bytes: int, private: bool) -> None:
        """`private`: no other engine uses `path`. Raises OSError when nothing can be written there."""
        self._root = path / shape.hex()
        self._shape, self._block_bytes, self._private = shape, block_bytes, private
        self._writer, self._number = secrets.token_hex(4), itertools.count()
        self._root.mkdir(parents=True, exist_ok=True)
        probe = self._root / f".{self._writer}.tmp"
        probe.touch()
        probe.unlink()
        if private:
            self._clean()

    def scan(self) -> list[tuple[bytes, Place]]:
        found = list(self._files())
        if self._private:  # times of one clock
            found.sort(key=lambda item: item[0].stat().st_mtime_ns)
        return [named for _, named in found]

    def read(self, key: bytes, place: Place) -> np.ndarray:
        header, payload = bytearray(HEADER_BYTES), np.empty(self._block_bytes, np.uint8)
        with open(self._file(key, place), "rb", buffering=0) as file:
            count = os.readv(file.fileno(), [header, payload.data])
        if count != HEADER_BYTES + self._block_bytes:
            raise WireError(f"KV block {key.hex()} is {count} bytes long; expected {HEADER_BYTES + self._block_bytes}")
        label = open_sealed(header, payload)
        if (label.key, label.shape, label.weights[:8]) != (key, self._shape, place.weights):
            raise WireError(f"KV block {key.hex()}: the file holds another one")
        return payload

    def write(self, label: Label, version: int, payload: Payload) -> None:
        file = self._file(label.key, Place(version, label.weights[:8]))
        fresh = file.with_name(f".{file.name}.{self._writer}.{next(self._number)}.tmp")
        try:
            self._write(fresh, seal(label, payload), payload)
            os.replace(fresh, file)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise

    def remove(self, key: bytes, place: Place) -> None:
        self._file(key, place).unlink(missing_ok=True)

    def _clean(self) -> None:
        """Remove what an earlier process has left half-written."""
        for folder in self._folders():
            for file in Path(folder.path).glob(".*.tmp"):
                file.unlink(missing_ok=True)

    def _write(self, fresh: Path, header: bytes, payload: Payload) -> None:
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileNotFoundError:  # the first block with these two digits, or the folder was deleted under us
            fresh.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with open(descriptor, "wb", buffering=0) as file:
            written = os.writev(file.fileno(), [header, np.frombuffer(payload, np.uint8).data])
        if written != len(header) + self._block_bytes:
            raise OSError(errno.ENOSPC, "only a part could be written", str(fresh))

    def _files(self) -> Iterator[tuple[os.DirEntry[str], tuple[bytes, Place]]]:
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError), os.scandir(folder.path) as entries:
                for entry in entries:
                    named = _parse(entry.name)
                    if named is not None:
                        yield entry, named

    def _folders(self) -> list[os.DirEntry[str]]:
        with os.scandir(self._root) as entries:
            return [entry for entry in entries if entry.is_dir()]

    def _file(self, key: bytes, place: Place) -> Path:
        name = f"{key.hex()}.{place.version}.{place.weights.hex()}{_SUFFIX}"
        return self._root / name[:2] / name


def _parse(name: str) -> tuple[bytes, Place] | None:
    """Key and place that a file name says; None for anything else that lies there."""
    parts = name.removesuffix(_SUFFIX).split(".")
    if not name.endswith(_SUFFIX) or len(parts) != 3 or (len(parts[0]), len(parts[2])) != (_KEY_DIGITS, _WEIGHTS_DIGITS):
        return None
    try:
        return bytes.fromhex(parts[0]), Place(int(parts[1]), bytes.fromhex(parts[2]))
    except ValueError:
        return None


def claim_folder(path: Path) -> tuple[Path, int]:
    """A folder under `path` that belongs to this process until it ends: the first that no other engine of this host has.

    The number is the open lock file's. Raises ConfigError when `path` cannot be used.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            lock = os.open(path / f"{number}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return path / str(number), lock
            except BlockingIOError:
                os.close(lock)
    except OSError as error:
        raise ConfigError(f"engine.tiers.disk_path = {str(path)!r} cannot be used: {error.strerror or error}") from None
    raise AssertionError("unreachable")
