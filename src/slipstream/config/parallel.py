"""[trainer.parallel]: how many processes train one policy, and what they share between them. The picture is in docs/parallel.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section


class ParallelConfig(Section):
    """The trainer's processes: processes = dp_replicate x dp_shard x cp. Experts borrow from dp_shard x cp."""

    processes: int = Field(default=1, ge=1)
    """Trainer processes of the run. Those that dp_replicate and cp leave over shard the weights (dp_shard, FSDP)."""
    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the sharded weights (HSDP): each trains on rows of its own, gradients are added up between them."""
    cp: int = Field(default=1, ge=1)
    """Processes that share the tokens of one row (context parallelism)."""
    cp_method: Literal["all_gather", "ring", "ulysses"] = "all_gather"
    """all_gather: every process sees all keys and values of the row. ring: those of one process after the other, where needed. ulysses:
    tokens are swapped for heads around attention."""
    ep: int = Field(default=1, ge=1)
    """Processes that share the experts of a layer (expert parallelism); divides dp_shard x cp."""
    fp8_all_gather: bool = False
    """With trainer.dtype = "float8": shards travel as FP8 codes and scales, half the bytes. Needs shards that cut no block of 128 x 128."""

    @property
    def dp_shard(self) -> int:
        """Processes that shard the weights and each train on rows of their own."""
        return self.processes // (self.dp_replicate * self.cp)

    @property
    def data(self) -> int:
        """Processes, or groups of `cp` processes, that train on rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Processes over which the weights outside the experts are sharded."""
        return self.dp_shard * self.cp

    @model_validator(mode="after")
    def _factors(self):
        problem = _problem(self.processes, self.dp_replicate, self.cp, self.ep)
        if problem:
            raise ValueError(f"{problem}. The nearest that fits: {self.nearest()}")
        return self

    def nearest(self, fits: Callable[[int, int], bool] = lambda cp, ep: True) -> str:
        """The valid combination of this many processes that is closest, as one writes it. `fits(cp, ep)` may ask for more."""
        wanted = (self.dp_replicate, self.cp, self.ep)
        divisors = [n for n in range(1, self.processes + 1) if self.processes % n == 0]
        valid = [c for c in product(divisors, repeat=3) if not _problem(self.processes, *c) and fits(c[1], c[2])]
        best = min(valid, key=lambda c: (round(sum(abs(math.log(a / b)) for a, b in zip(c, wanted, strict=True)), 9), c))
        return f"processes = {self.processes}, dp_replicate = {best[0]}, cp = {best[1]}, ep = {best[2]}"


def _problem(processes: int, dp_replicate: int, cp: int, ep: int) -> str:
    """Why the sizes do not go together; '' when they do."""
    if processes % (dp_replicate * cp):
        return (
            f"trainer.parallel: processes = {processes} is no multiple of dp_replicate x cp = {dp_replicate} x {cp}, "
            "so the processes left over would have nothing to do"
        )
    fsdp = processes // dp_replicate
    if fsdp % ep:
        return (
            f"trainer.parallel: ep = {ep} does not divide dp_shard x cp = {processes // (dp_replicate * cp)} x {cp} = {fsdp}, "
            "the processes of one copy, from which the experts borrow theirs"
        )
    return ""
