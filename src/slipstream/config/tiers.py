"""[engine.tiers]: where KV goes that the device has no room for."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from slipstream.config.base import Section


class TiersConfig(Section):
    """KV blocks beyond the device: RAM, then a local disk, then a folder that engines share. A tier of 0 MiB is off."""

    ram_mib: int = Field(default=0, ge=0)
    """Memory of the engine process for blocks that the device had to give up."""
    disk_path: Path | None = None
    """Folder on a local disk. It may be given to several engines of one host: each claims a folder of its own in it. Survives a restart."""
    disk_mib: int = Field(default=0, ge=0)
    """Most that one engine keeps there."""
    shared_path: Path | None = None
    """Folder that several engines read and write, on one host or on a network file system."""
    shared_mib: int = Field(default=0, ge=0)
    """Most that the folder holds, of all engines together. Give all of them the same value: each makes room before it writes."""
    queue_mib: int = Field(default=64, ge=1)
    """Blocks on their way to disk or shared folder. What does not fit because writing is slow is dropped and counted; steps never wait."""
    fetch_timeout_s: float = Field(default=5.0, gt=0)
    """Most seconds that a request waits for its blocks. What has not come by then is computed."""
    min_tokens: int = Field(default=32, ge=1)
    """Fewer consecutive tokens than this are not fetched: a fetch costs about as much as one more step, in which they are computed."""
    scan_s: float = Field(default=2.0, gt=0)
    """Seconds between two looks at which blocks other engines have put into the shared folder."""

    @property
    def enabled(self) -> bool:
        return bool(self.ram_mib or self.disk_mib or self.shared_mib)

    @model_validator(mode="after")
    def _cross_checks(self):
        for name, path, mib in (("disk", self.disk_path, self.disk_mib), ("shared", self.shared_path, self.shared_mib)):
            if (path is None) != (mib == 0):
                raise ValueError(
                    f"engine.tiers.{name}_path = {str(path) if path else None!r} and engine.tiers.{name}_mib = {mib}: "
                    "set both, or neither to leave the tier out"
                )
        if self.disk_path is not None and self.disk_path == self.shared_path:
            raise ValueError(
                f"engine.tiers.disk_path and engine.tiers.shared_path are both {str(self.disk_path)!r}: a disk tier belongs to one engine; "
                "use two folders"
            )
        return self
