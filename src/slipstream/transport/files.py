"""Writing files so that a reader sees the whole of one or nothing of it, and a crash leaves the old one or the new one.

Knows nothing of what is in the files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block that does not say which file it is about (a full disk, when writing) gets this name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def write_durably(path: Path, *pieces: bytes | memoryview) -> None:
    """Write the pieces end to end and fsync `path` in place.

    For a file that gets its final name by `publish_file` or a folder rename later.
    """
    with naming(path), open(path, "wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def write_private(path: Path, text: str) -> Path:
    """Write `text` where only this user can read it, under a temporary name beside `path`, which the caller renames or links. Makes the
    folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_suffix(f".{os.getpid()}.tmp")
    with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    return temp


def publish_file(temp: Path, path: Path) -> None:
    """Give a durably written temporary file its final name, and make the name itself durable."""
    os.replace(temp, path)
    fsync_folder(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """`data` appears under `path` at once and survives a power loss after the return."""
    temp = temp_path(path)
    write_durably(temp, data)
    publish_file(temp, path)


def temp_path(path: Path) -> Path:
    """Where a file lives before it has its final name: hidden, in the same folder, so that the rename is atomic."""
    return path.with_name(f".tmp-{path.name}")


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename is only on disk once its folder is."""
    fsync_file(folder)


def fsync_file(path: Path) -> None:
    """Make what was written to `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
