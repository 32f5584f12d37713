"""Folders that are whole or absent: written beside their place, synced to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import ConfigError, ModelError


def check_model_folder(folder: Path) -> None:
    """Raises ModelError with the ways to get a model where there is none."""
    if (folder / "config.json").is_file():
        return
    what = (
        "has no config.json, so it is not a model folder" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
    )
    raise ModelError(
        f"model folder {folder} {what}. Name an HF folder (as save_pretrained writes it, or RUN/final), or make a small model: "
        f"slipstream make-model {folder} --preset tiny-moe --env calculator"
    )


@contextmanager
def atomic_folder(folder: str | Path, holds: str = "config.json") -> Iterator[Path]:
    """Yield an empty folder to fill; on success it takes the place of `folder`. On failure it vanishes.

    Raises ConfigError, before anything is written: see `check_replaceable`.
    """
    folder = Path(folder)
    check_replaceable(folder, holds)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        _sync(fresh)
        _replace(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def check_replaceable(folder: str | Path, holds: str = "config.json") -> None:
    """Raises ConfigError when something of the user's stands there: anything but an empty folder or a flat one of the same kind.

    The kind is known by the file `holds`: a model by its config.json.
    """
    folder = Path(folder)
    if not folder.exists():
        return
    entries = list(folder.iterdir()) if folder.is_dir() else [folder]
    if entries and not ((folder / holds).is_file() and all(entry.is_file() for entry in entries)):
        made = "a model" if holds == "config.json" else "an adapter"
        kind = f"folder that is not {made} folder" if folder.is_dir() else "file"
        raise ConfigError(f"{folder} is an existing {kind} and is not replaced by {made}; name another folder, or delete it yourself")


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(fresh: Path, folder: Path) -> None:
    """Rename cannot replace a folder that is not empty: the old one steps aside first."""
    if not folder.exists():
        fresh.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)
