"""Which trainer process belongs to which groups. The same arithmetic as `parallel.mesh`, without joining anything (a test compares them).

Ranks are numbered rank = (replica · dp_shard + shard) · cp + context; `ep` ranks are neighbours, of one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config.run import RunConfig
from slipstream.models.spec import ModelSpec

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and groups of the trainer's processes."""

    processes: int
    nodes: int
    dp_replicate: int
    dp_shard: int
    cp: int
    ep: int
    num_experts: int

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec) -> Layout:
        p = config.trainer.parallel
        return cls(p.processes, config.cluster.nodes, p.dp_replicate, p.dp_shard, p.cp, p.ep, spec.num_experts)

    @property
    def data(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp

    @property
    def expert_fsdp(self) -> int:
        return self.fsdp // self.ep

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes

    def groups(self) -> Mapping[str, Groups]:
        """Ranks that exchange something with one another, by what they share. Groups of one are left out."""
        found = {
            "cp (tokens of a row)": self._blocks(self.cp),
            "fsdp (weights outside the experts)": self._blocks(self.fsdp),
            "ep (experts of a layer)": self._blocks(self.ep),
            "expert_fsdp (weights of the same experts)": tuple(
                tuple(range(copy + first, copy + self.fsdp, self.ep))
                for copy in range(0, self.processes, self.fsdp)
                for first in range(self.ep)
            ),
            "dp_replicate (copies of the weights)": tuple(tuple(range(first, self.processes, self.fsdp)) for first in range(self.fsdp)),
        }
        if self.ep == 1:  # experts are then sharded with everything else
            del found["expert_fsdp (weights of the same experts)"]
        return {name: groups for name, groups in found.items() if len(groups[0]) > 1}

    def experts_of(self, rank: int) -> tuple[int, int]:
        """First and last routed expert of each layer that the rank computes."""
        here = self.num_experts // self.ep
        return rank % self.ep * here, (rank % self.ep + 1) * here - 1

    def nodes_of(self, groups: Groups) -> int:
        """Most nodes that one group touches."""
        return max(len({rank // self.processes_per_node for rank in group}) for group in groups)

    def as_dict(self) -> dict[str, Any]:
        names = ("processes", "nodes", "dp_replicate", "dp_shard", "cp", "ep", "data", "fsdp", "expert_fsdp", "processes_per_node")
        groups = {name: {"groups": groups, "nodes": self.nodes_of(groups)} for name, groups in self.groups().items()}
        experts = [self.experts_of(rank) for rank in range(self.ep)] if self.num_experts else []
        return {**{name: getattr(self, name) for name in names}, "groups": groups, "experts_by_ep_rank": experts}

    def _blocks(self, size: int) -> Groups:
        return tuple(tuple(range(first, first + size)) for first in range(0, self.processes, size))


def ranks_text(group: Sequence[int]) -> str:
    """'0-7', '0 8 ... 88', '0 4'."""
    if len(group) < 3:
        return " ".join(map(str, group))
    step = group[1] - group[0]
    return f"{group[0]}-{group[-1]}" if step == 1 else f"{group[0]} {group[1]} ... {group[-1]}"
