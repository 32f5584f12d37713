"""The processes of an engine that share its experts: how they join, agree, exchange tokens in every MoE layer, and move experts.

Everything is one gloo group. A step of the group is one `agree` and then, in each process, every MoE layer of the model once: with the
tokens of its own requests, or with none, for then it has to serve the experts that others ask. What a process computes does not depend
on where the experts are or on who else asks: pairs of a token and an expert travel, results come back one a pair, and are added up where
the token is, in the order of one process (`ops.combine_experts`).

Shapes: T tokens, K experts per token, D hidden features, L MoE layers, E experts, R ranks, S slots of each, C copies of an expert; N pairs
that leave, M that arrive.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.config.wide import WideConfig
from slipstream.errors import ConfigError, EngineUnavailable, StateError
from slipstream.ops import combine_experts
from slipstream.parallel.meet import meet
from slipstream.parallel.placement import Placement

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_TD, ids_TK, gates_TK) -> y_TD, with slots in the place of ids"""
_Value = TypeVar("_Value")

START_S = 600.0
"""How long a process waits at its start for the others, which may have to load what the disk does not give them all at once."""


@contextmanager
def joined(config: WideConfig) -> Iterator[WideGroup]:
    """Join the other ranks for the block; see `meet`.

    Raises ConfigError: started as another number of processes; EngineUnavailable: the others did not come.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if int(world) != config.ranks:
        raise ConfigError(
            f"engine.ep.ranks = {config.ranks}, but this process was started as one of {world} (WORLD_SIZE). Let `slipstream rl` or "
            f"`slipstream engine --model` start them, or torchrun --nproc-per-node {config.ranks}"
        )
    try:
        meet(START_S)
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineUnavailable(f"an engine process did not meet the {config.ranks - 1} others that share its experts: {error}") from error
    try:
        yield WideGroup(config.timeout_s)
    finally:
        dist.destroy_process_group()


class WideGroup:
    """The ranks. After an exchange that failed (`broken`) nothing is left to do but to end the process: the others wait in vain."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self._group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
        self.broken: EngineUnavailable | None = None

    def exchange(self, value: _Value) -> list[_Value]:
        """At the start: the values of all ranks, in order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def largest(self, values: Sequence[int]) -> list[int]:
        """The maximum of each number over all ranks; waits for them."""
        found = torch.tensor(values, dtype=torch.int64)
        with self.whole():
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return found.tolist()

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """Sums of integers over all ranks."""
        found = torch.from_numpy(values.copy())
        with self.whole():
            dist.all_reduce(found, group=self._group)
        return found.numpy()

    def swap(self, x: Tensor, sent_R: Sequence[int], received_R: Sequence[int]) -> Tensor:
        """Rows in the order of the rank that they go to; back come rows in the order of the rank that they come from."""
        out = x.new_empty(sum(received_R), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(received_R), list(sent_R), group=self._group)
        return out

    def swap_counts(self, sent_RS: Tensor) -> Tensor:
        received_RS = torch.empty_like(sent_RS)
        dist.all_to_all_single(received_RS, sent_RS, group=self._group)
        return received_RS

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around something that all ranks do together: an error in it breaks the group. Raises EngineUnavailable in its place."""
        if self.broken is not None:
            raise self.broken
        try:
            yield
        except Exception as error:
            self.broken = EngineUnavailable(self._reason(error))
            raise self.broken from error

    def _reason(self, error: Exception) -> str:
        text = str(error)
        if "imed out" in text:
            return (
                f"rank {self.rank} of {self.size} engine processes that share experts waited {self.timeout_s:g} s in vain for another one, "
                "which stands still or is far behind (engine.ep.timeout_s): see their logs"
            )
        if isinstance(error, RuntimeError) and "gloo" in text:
            cause = re.sub(r"^\[.*?\] *", "", text.splitlines()[0]).partition(". ")[0]
            return f"rank {self.rank} of {self.size} engine processes that share experts lost another one ({cause}): see their logs"
        return (
            f"rank {self.rank} of {self.size} engine processes that share experts failed amidst the others: {type(error).__name__}: {text}"
        )


class WideExperts:
    """The experts of all layers, wherever they are: one for all copies of the model in this process.

    `begin`, then every layer in order, then `finish`, which goes through the layers that were left out with no tokens.
    """

    def __init__(self, group: WideGroup, placement: Placement, num_experts: int) -> None:
        layers = len(placement.experts_LRS)
        self.group, self.num_experts = group, num_experts
        self.dispatch_s_L, self.compute_s_L, self.combine_s_L = (np.zeros(layers) for _ in range(3))
        """Seconds in each layer since the start: until the tokens of all ranks have come, in own experts, until all results have."""
        self.load_LE = np.zeros((layers, num_experts), np.int64)
        """Pairs that this rank has sent to each expert."""
        self.served_L = np.zeros(layers, np.int64)
        """Pairs that this rank has computed."""
        self.done = layers
        self._turn = group.rank
        self.set(placement)

    def __deepcopy__(self, memo: dict[int, Any]) -> WideExperts:
        return self

    def set(self, placement: Placement) -> None:
        self.placement = placement
        self._slots_LEC = torch.from_numpy(placement.slots(self.num_experts))
        self._copies_LE = torch.from_numpy(placement.copies(self.num_experts))
        self._single = self._slots_LEC.shape[2] == 1

    def begin(self) -> None:
        self.done = 0
        self._turn += 1  # few tokens a step must not always take the same copy

    def finish(self, layers: Sequence[Callable[[], object]]) -> None:
        """`layers`: each goes through `exchange` with no tokens."""
        for serve in layers[self.done :]:
            serve()

    def exchange(self, layer: int, compute: Compute, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """y_TD = Σ_k gate_k · expert[id_k](x). `compute`: the experts in the slots of this rank. Waits for all ranks."""
        if layer != self.done:
            raise StateError(
                f"MoE layer {layer} asks for its experts when it is the turn of layer {self.done}: all ranks take the same order"
            )
        slot_N = self._choose(layer, ids_TK)
        self.done += 1
        with self.group.whole():
            return self._exchange(layer, compute, x_TD, ids_TK, gates_TK, slot_N)

    def _exchange(self, layer: int, compute: Compute, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, slot_N: Tensor) -> Tensor:
        began = time.perf_counter()
        placement, top_k = self.placement, ids_TK.shape[1]
        order_N = slot_N.argsort(stable=True)
        sent_RS = torch.bincount(slot_N, minlength=placement.num_ranks * placement.num_slots).view(placement.num_ranks, -1)
        received_RS = self.group.swap_counts(sent_RS)
        sent_R, received_R = sent_RS.sum(1).tolist(), received_RS.sum(1).tolist()
        x_MD = self.group.swap(x_TD.index_select(0, order_N // top_k), sent_R, received_R)
        arrived = time.perf_counter()
        slot_M = torch.arange(placement.num_slots).repeat(placement.num_ranks).repeat_interleave(received_RS.flatten())
        y_MD = compute(x_MD, slot_M.unsqueeze(1), x_MD.new_ones(len(x_MD), 1)) if len(x_MD) else x_MD
        computed = time.perf_counter()
        y_ND = self.group.swap(y_MD, received_R, sent_R)
        y_TKD = torch.empty_like(y_ND).index_copy_(0, order_N, y_ND).view(*ids_TK.shape, x_TD.shape[1])
        y_TD = combine_experts(y_TKD, ids_TK, gates_TK, self.num_experts)
        self.dispatch_s_L[layer] += arrived - began
        self.compute_s_L[layer] += computed - arrived
        self.combine_s_L[layer] += time.perf_counter() - computed
        self.served_L[layer] += len(x_MD)
        return y_TD

    def _choose(self, layer: int, ids_TK: Tensor) -> Tensor:
        """[N]: the slot of each pair. The copies of an expert take turns, so each gets its share whoever asks."""
        id_N = ids_TK.flatten().long()
        count_E = torch.bincount(id_N, minlength=self.num_experts)
        self.load_LE[layer] += count_E.numpy()
        slots_EC = self._slots_LEC[layer]
        if self._single:
            return slots_EC[id_N, 0]
        order_N = id_N.argsort(stable=True)
        nth_N = torch.empty_like(id_N)
        nth_N[order_N] = torch.arange(len(id_N)) - (count_E.cumsum(0) - count_E)[id_N[order_N]]
        return slots_EC[id_N, (nth_N + self._turn) % self._copies_LE[layer][id_N]]


def move_experts(stacks: Sequence[Mapping[str, Tensor]], before: Placement, after: Placement, group: WideGroup) -> int:
    """Bring the weights of every layer (a stack: [S, ...] by name) to where `after` has them, in place; the bits stay. All ranks call this.

    What is in the process already is copied there; else the lowest rank that has it sends it. Returns how many experts came from others.
    """
    moved = 0
    with group.whole():
        for layer, stack in enumerate(stacks):
            old_RS, new_RS = before.experts_LRS[layer], after.experts_LRS[layer]
            if (old_RS == new_RS).all():
                continue
            ways = _ways(old_RS, new_RS)
            send = sorted((way for way in ways if way[0] == group.rank), key=lambda way: way[2])
            receive = sorted((way for way in ways if way[2] == group.rank), key=lambda way: way[0])
            sent_R, received_R = (np.bincount([way[i] for way in w], minlength=group.size).tolist() for w, i in ((send, 2), (receive, 0)))
            taken, seats = (
                torch.tensor([way[1] for way in send], dtype=torch.long),
                torch.tensor([way[3] for way in receive], dtype=torch.long),
            )
            for weight in stack.values():
                weight.index_copy_(0, seats, group.swap(weight.index_select(0, taken), sent_R, received_R))
            moved += sum(way[0] != group.rank for way in receive)
    return moved


def _ways(old_RS: np.ndarray, new_RS: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(from rank, slot, to rank, slot) of every slot whose expert changes, in the order in which a rank sends and another receives."""
    homes: dict[int, list[tuple[int, int]]] = {}
    for rank, experts in enumerate(old_RS.tolist()):
        for slot, expert in enumerate(experts):
            homes.setdefault(expert, []).append((rank, slot))
    ways = []
    for rank, slot in zip(*(at.tolist() for at in np.nonzero(old_RS != new_RS)), strict=True):
        found = homes[int(new_RS[rank, slot])]
        ways.append((*next((home for home in found if home[0] == rank), found[0]), rank, slot))
    return ways
