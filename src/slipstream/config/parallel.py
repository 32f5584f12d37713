"""[trainer.parallel]: how many processes train one policy, and what they share between them. The picture is in docs/parallel.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section


class ParallelConfig(Section):
    """The trainer's processes: processes = dp_replicate x dp_shard x cp x pp. Experts borrow from dp_shard x cp."""

    processes: int = Field(default=1, ge=1)
    """Trainer processes of the run. Those that dp_replicate, cp and pp leave over shard the weights (dp_shard, FSDP)."""
    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the sharded weights (HSDP): each trains on rows of its own, gradients are added up between them."""
    cp: int = Field(default=1, ge=1)
    """Processes that share the tokens of one row (context parallelism)."""
    cp_method: Literal["all_gather", "ring", "ulysses"] = "all_gather"
    """all_gather: every process sees all keys and values of the row. ring: those of one process after the other, where needed. ulysses:
    tokens are swapped for heads around attention."""
    ep: int = Field(default=1, ge=1)
    """Processes that share the experts of a layer (expert parallelism); divides dp_shard x cp."""
    ep_chunks: int = Field(default=1, ge=1)
    """Parts of the tokens of a pass that travel to experts one after the other, while others are computed."""
    fp8_all_gather: bool = False
    """With trainer.dtype = "float8": shards travel as FP8 codes and scales, half the bytes. Needs shards that cut no block of 128 x 128."""
    pp: int = Field(default=1, ge=1)
    """Groups of processes that hold a part of the layers each (pipeline parallelism)."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved_1f1b"] = "1f1b"
    """1f1b: a backward pass as soon as one is possible, few rows in flight. gpipe: all forward passes first. interleaved_1f1b: 1f1b with
    pp_stages parts of the layers in each process, which shortens the idle time at both ends of a step and sends more."""
    pp_stages: int = Field(default=1, ge=1)
    """Parts of the layers in each process of a pipeline: two or more with interleaved_1f1b, one with the others."""

    @property
    def dp_shard(self) -> int:
        """Processes that shard the weights and each train on rows of their own."""
        return self.processes // (self.dp_replicate * self.cp * self.pp)

    @property
    def data(self) -> int:
        """Processes, or groups of `cp` processes, that train on rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Processes over which the weights outside the experts are sharded."""
        return self.dp_shard * self.cp

    @property
    def num_stages(self) -> int:
        """Parts of the layers, over all processes; 1 without a pipeline."""
        return self.pp * self.pp_stages if self.pp > 1 else 1

    @model_validator(mode="after")
    def _factors(self):
        problem = _problem(self.processes, self.dp_replicate, self.cp, self.ep, self.pp)
        if problem:
            raise ValueError(f"{problem}. The nearest that fits: {self.nearest()}")
        if self.pp > 1 and (self.pp_schedule == "interleaved_1f1b") != (self.pp_stages > 1):
            raise ValueError(
                f"trainer.parallel: pp_schedule = {self.pp_schedule!r} and pp_stages = {self.pp_stages}: interleaved_1f1b takes turns "
                "between two or more parts of the layers in a process, the other schedules have one part. Set pp_stages = 2 with "
                "'interleaved_1f1b', or pp_stages = 1 with '1f1b' or 'gpipe'"
            )
        return self

    def nearest(self, fits: Callable[[int, int, int], bool] = lambda cp, ep, pp: True) -> str:
        """The valid combination of this many processes that is closest, as one writes it. `fits(cp, ep, pp)` may ask for more."""
        wanted = (self.dp_replicate, self.cp, self.ep, self.pp)
        divisors = [n for n in range(1, self.processes + 1) if self.processes % n == 0]
        valid = [c for c in product(divisors, repeat=4) if not _problem(self.processes, *c) and fits(*c[1:])]
        best = min(valid, key=lambda c: (round(sum(abs(math.log(a / b)) for a, b in zip(c, wanted, strict=True)), 9), c[3], c))
        return f"processes = {self.processes}, dp_replicate = {best[0]}, cp = {best[1]}, ep = {best[2]}, pp = {best[3]}"


def _problem(processes: int, dp_replicate: int, cp: int, ep: int, pp: int) -> str:
    """Why the sizes do not go together; '' when they do."""
    if processes % (dp_replicate * cp * pp):
        return (
            f"trainer.parallel: processes = {processes} is no multiple of dp_replicate x cp x pp = {dp_replicate} x {cp} x {pp}, "
            "so the processes left over would have nothing to do"
        )
    fsdp = processes // (dp_replicate * pp)
    if fsdp % ep:
        return (
            f"trainer.parallel: ep = {ep} does not divide dp_shard x cp = {fsdp // cp} x {cp} = {fsdp}, "
            "the processes of one copy, from which the experts borrow theirs"
        )
    return ""
