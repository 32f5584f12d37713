"""Which process does what: the one place that joins the processes of a trainer and gives them their coordinates.

    rank = ((pipe · dp_replicate + replica) · dp_shard + shard) · cp + context        rows: data = replica · dp_shard + shard
    weights outside the experts:  dp_replicate x fsdp,               fsdp = dp_shard · cp
    experts:                      dp_replicate x expert_fsdp x ep,   expert_fsdp · ep = fsdp

Ranks that differ only in `context` hold neighbouring tokens of the same row; `ep` ranks are neighbours too. Ranks that differ only in
`pipe` have the same tokens and other layers: each value of `pipe` has weights of its own, and the meshes above for them.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.config.parallel import ParallelConfig
from slipstream.errors import ConfigError, TrainerError
from slipstream.parallel.meet import meet

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The coordinates of this process and the groups that it talks to. Alone, everything that adds up or gathers does nothing."""

    config: ParallelConfig
    rank: int = 0
    dense: DeviceMesh | None = None
    """[dp_replicate, fsdp]; None when alone, as the others."""
    expert: DeviceMesh | None = None
    """[dp_replicate, expert_fsdp, ep]."""
    rows: DeviceMesh | None = None
    """[data, cp]."""
    pipes: dist.ProcessGroup | None = None
    """The processes that differ only in `pipe`, in its order."""

    words: dist.ProcessGroup | None = None
    """All processes; what the leading one says goes this way, and may be long in coming."""

    @property
    def alone(self) -> bool:
        return self.config.processes == 1

    @property
    def leads(self) -> bool:
        """Rank 0 talks to the world: batches, published weights, checkpoints, metrics."""
        return self.rank == 0

    @property
    def data(self) -> int:
        return self.rank % self._per_pipe // self.config.cp

    @property
    def context(self) -> int:
        return self.rank % self.config.cp

    @property
    def pipe(self) -> int:
        return self.rank // self._per_pipe

    @property
    def _per_pipe(self) -> int:
        return self.config.processes // self.config.pp

    @property
    def expert_rank(self) -> int:
        return self.rank % self.config.ep

    def shards(self, experts: bool) -> DeviceMesh:
        """Over which FSDP shards the weights: two dimensions where there are several copies (HSDP)."""
        mesh, names = (self.expert, ("dp_replicate", "expert_fsdp")) if experts else (self.dense, ("dp_replicate", "fsdp"))
        assert mesh is not None
        return mesh[names] if self.config.dp_replicate > 1 else mesh[names[1]]

    @property
    def expert_group(self) -> dist.ProcessGroup:
        assert self.expert is not None
        return self.expert.get_group("ep")

    @property
    def context_group(self) -> dist.ProcessGroup:
        assert self.rows is not None
        return self.rows.get_group("cp")

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place; the same bits everywhere."""
        if not self.alone:
            dist.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The maximum over all processes, in place."""
        if not self.alone:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def exchange(self, value: _Value) -> list[_Value]:
        """The values of all processes, in order of rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.config.processes
        dist.all_gather_object(values, value)
        return values

    def tell(self, message: bytes) -> None:
        """From the leading process to all others, which `hear` it."""
        if not self.alone:
            dist.broadcast(torch.tensor(len(message)), 0, self.words)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, self.words)

    def hear(self) -> bytes:
        """Waits for the leading process to `tell`."""
        length = torch.tensor(0)
        dist.broadcast(length, 0, self.words)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, 0, self.words)
        return message.numpy().tobytes()


ALONE = Mesh(ParallelConfig())
"""One process."""


@contextmanager
def joined(config: ParallelConfig, timeout_s: float, wait_s: float = 0.0) -> Iterator[Mesh]:
    """Join the other trainer processes for the block. One process needs none and joins nothing.

    They find each other by `meet`. `timeout_s` is how long one process may wait for another in an exchange, `wait_s` how long for the word
    of the leading one, if that is longer. Raises ConfigError: started as another number of processes than the run file says; TrainerError:
    the others did not come, or another one is gone, or stands still.
    """
    if config.processes == 1:
        yield ALONE
        return
    world = os.environ.get("WORLD_SIZE", "1")
    if int(world) != config.processes:
        raise ConfigError(
            f"trainer.parallel.processes = {config.processes}, but this process was started as one of {world} (WORLD_SIZE). Let "
            f"`slipstream rl` or `slipstream sft` start them, or torchrun --nproc-per-node {config.processes}"
        )
    try:
        meet(timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise TrainerError(f"a trainer process did not meet the {config.processes - 1} others: {error}") from error
    patience_s = timeout_s if dist.get_rank() == 0 else max(timeout_s, wait_s)  # who is told something is listening already
    words = dist.new_group(timeout=datetime.timedelta(seconds=patience_s))
    try:
        yield replace(spread(config), words=words)
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        raise _left_alone(dist.get_rank(), timeout_s, str(error)) from error
    finally:
        dist.destroy_process_group()


def _left_alone(rank: int, patience_s: float, error: str) -> TrainerError:
    """What an error of an exchange means."""
    if "imed out" in error:
        return TrainerError(
            f"trainer process {rank} waited {patience_s:.0f} s in vain for another one, which stands still or is far behind "
            "(trainer.stall_timeout_s). Raise it if this machine is that slow; else see the logs of the other trainer processes"
        )
    reason = re.sub(r"^\[.*?\] *", "", error.splitlines()[0]).partition(". ")[0]
    return TrainerError(f"trainer process {rank} lost the connection to another one ({reason}): it ended, see its log for the cause")


def spread(config: ParallelConfig) -> Mesh:
    """The groups of processes that have joined. All of them call this together."""

    def make(**sizes: int) -> DeviceMesh:
        """Of the processes with the same layers."""
        return init_device_mesh("cpu", (config.pp, *sizes.values()), mesh_dim_names=("pp", *sizes))[tuple(sizes)]

    replicas, fsdp, ep = config.dp_replicate, config.fsdp, config.ep
    everyone = init_device_mesh("cpu", (config.pp, replicas * fsdp), mesh_dim_names=("pp", "same_layers"))
    return Mesh(
        config,
        dist.get_rank(),
        dense=make(dp_replicate=replicas, fsdp=fsdp),
        expert=make(dp_replicate=replicas, expert_fsdp=fsdp // ep, ep=ep) if ep > 1 else None,
        rows=make(data=config.data, cp=config.cp),
        pipes=everyone.get_group("pp"),
    )
