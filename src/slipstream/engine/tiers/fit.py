"""Whether the tiers of KV can be used as [engine.tiers] asks. Torch-free: refused before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.config.tiers import TiersConfig
from slipstream.engine.room import HEADER_BYTES, MIB
from slipstream.errors import ConfigError


def check_sizes(config: TiersConfig, payload_bytes: int) -> None:
    """`payload_bytes`: of a block, without the header that it has in a file. Raises ConfigError: a tier holds no block."""
    for name, mib in (("ram", config.ram_mib), ("disk", config.disk_mib), ("shared", config.shared_mib)):
        size = payload_bytes + (HEADER_BYTES if name != "ram" else 0)
        if mib and mib * MIB < size:
            raise ConfigError(f"engine.tiers.{name}_mib = {mib} holds no block of {size / MIB:.2f} MiB: raise it, or 0 to leave it out")


def check_folders(config: TiersConfig) -> None:
    """Raises ConfigError: a folder is not there and cannot be made, or nothing can be written into it."""
    for name, path in (("disk", config.disk_path), ("shared", config.shared_path)):
        if path is not None:
            check_writable(f"engine.tiers.{name}_path", path)


def check_writable(key: str, path: Path) -> None:
    """Looks only: nothing is made. Raises ConfigError."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ConfigError(f"{key} = {str(path)!r} cannot be used: {there} is not a folder; name another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} = {str(path)!r} cannot be used: {there} cannot be written; name another folder")
