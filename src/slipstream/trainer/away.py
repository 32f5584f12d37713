"""The optimizer's moments in files between steps (Ren et al., "ZeRO-Offload", 2021, keeps them off the GPU for the same reason).

A step works on one parameter at a time: its moments are read while the one before is worked on, and written out by the kernel while the
next one is. So a process needs memory for the moments of its largest parameter, or of its part of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.errors import ConfigError
from slipstream.ops.spill import Spilled
from slipstream.parallel.fsdp import local


class Away:
    """Where moments are between steps."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: the folder cannot hold files."""
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"moments cannot be offloaded to trainer.offload.folder = {folder}: it is not a folder that can be written")
        self._folder = folder
        self._places: dict[tuple[Tensor, str], Spilled] = {}

    def expect(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """The moments of `parameter` will be needed soon."""
        for key in state:
            if (parameter, key) in self._places:
                self._places[parameter, key].expect()

    def keep(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Put `state` away, in place: its tensors can still be used, and are read back when they are. Counts of steps stay.

        Raises OSError: the disk is full.
        """
        for key, value in state.items():
            if not value.ndim:
                continue
            here = local(value)
            place = self._places.get((parameter, key))
            if place is None:
                place = self._places[parameter, key] = Spilled(self._folder, here.nbytes)
            there = place.tensor(here.shape, here.dtype)
            there.copy_(here)
            place.forget()
            state[key] = _sharded_as(value, there)


def _sharded_as(like: Tensor, here: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return here
    return DTensor.from_local(here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
