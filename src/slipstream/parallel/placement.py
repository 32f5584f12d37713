"""Where the experts of a group of processes live: which to copy, and how to pack them so that all processes have about equally much to do.

Pure; every process computes the same from the same load. The method is that of the expert-parallel load balancer of DeepSeek-V3
(DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4; https://github.com/deepseek-ai/EPLB, the policy over all ranks): a spare
place goes to the expert with the most load a copy, again and again; then copies are packed, heaviest first, each onto the process with the
least load. Ours also keeps copies of one expert apart, and numbers processes and places such that few experts have to move.

Shapes: L MoE layers, E experts, R ranks (processes), S slots of each for one expert a layer, C copies of an expert at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Placement:
    """`experts_LRS`: the expert in each slot. Every expert of a layer is in at least one."""

    experts_LRS: np.ndarray

    @property
    def num_ranks(self) -> int:
        return self.experts_LRS.shape[1]

    @property
    def num_slots(self) -> int:
        """Of each rank."""
        return self.experts_LRS.shape[2]

    def copies(self, num_experts: int) -> np.ndarray:
        """[L, E]: in how many slots each expert is."""
        return np.stack([np.bincount(experts_RS.ravel(), minlength=num_experts) for experts_RS in self.experts_LRS])

    def slots(self, num_experts: int) -> np.ndarray:
        """[L, E, C]: the slots of each expert, numbered through over all ranks. Where it has fewer than C, its first ones again."""
        flat_LN, copies_LE = self.experts_LRS.reshape(len(self.experts_LRS), -1), self.copies(num_experts)
        most = int(copies_LE.max(initial=1))
        table_LEC = np.zeros((*copies_LE.shape, most), np.int64)
        for layer, flat_N in enumerate(flat_LN):
            by_expert = np.split(np.argsort(flat_N, kind="stable"), np.cumsum(copies_LE[layer])[:-1])
            for expert, slots in enumerate(by_expert):
                table_LEC[layer, expert] = np.resize(slots, most)
        return table_LEC

    def rank_load(self, load_LE: np.ndarray) -> np.ndarray:
        """[L, R]: of each rank, when the copies of an expert share its load evenly."""
        each_LE = load_LE / self.copies(load_LE.shape[1])
        return np.stack([each_E[experts_RS].sum(1) for each_E, experts_RS in zip(each_LE, self.experts_LRS, strict=True)])


def slots_per_rank(num_experts: int, ranks: int, redundant: int) -> int:
    """An even share, rounded up, and the spare ones."""
    return -(-num_experts // ranks) + redundant


def imbalance(load_LR: np.ndarray) -> float:
    """Load of the busiest rank over the mean, averaged over layers: 1 is even, R is all on one. 1 without any load."""
    mean_L = load_LR.mean(1)
    return float((load_LR.max(1)[mean_L > 0] / mean_L[mean_L > 0]).mean()) if (mean_L > 0).any() else 1.0


def place(load_LE: np.ndarray, ranks: int, slots: int, before: Placement | None = None) -> Placement:
    """A placement for this load on `ranks` x `slots` slots, at least one an expert; `before`: what should move little from there."""
    layers = []
    for layer, load_E in enumerate(load_LE):
        copies_E = _replicate(load_E, ranks, slots)
        packed = _pack(load_E, copies_E, ranks, slots)
        old_RS = None if before is None else before.experts_LRS[layer]
        layers.append(np.array([sorted(experts) for experts in packed]) if old_RS is None else _numbered(packed, old_RS))
    return Placement(np.stack(layers).astype(np.int64))


def better(load_LE: np.ndarray, now: Placement, gain: float) -> Placement | None:
    """A placement whose imbalance is lower by the share `gain` at least; None: the present one stays."""
    found = place(load_LE, now.num_ranks, now.num_slots, now)
    old, new = imbalance(now.rank_load(load_LE)), imbalance(found.rank_load(load_LE))
    return found if new < old and new <= old * (1 - gain) else None


def _replicate(load_E: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """[E]: copies of each expert, one or more; not more than ranks, while others can have one."""
    copies_E = np.ones(len(load_E), np.int64)
    load_E = load_E + 1e-9 * max(float(load_E.sum()), 1.0)  # without load: the fewest copies first
    for _ in range(ranks * slots - len(load_E)):
        each_E = np.where(copies_E < ranks, load_E / copies_E, -1.0)
        copies_E[int(each_E.argmax())] += 1
    return copies_E


def _pack(load_E: np.ndarray, copies_E: np.ndarray, ranks: int, slots: int) -> list[list[int]]:
    """The experts of each rank. Heaviest copies first, each to the rank with the least load that has a free slot and no copy yet."""
    each_E = load_E / copies_E
    held: list[list[int]] = [[] for _ in range(ranks)]
    load_R = [0.0] * ranks
    for expert in np.argsort(-each_E, kind="stable").tolist():
        for _ in range(int(copies_E[expert])):
            free = [rank for rank in range(ranks) if len(held[rank]) < slots]
            rank = min([r for r in free if expert not in held[r]] or free, key=lambda r: (load_R[r], len(held[r])))
            held[rank].append(expert)
            load_R[rank] += float(each_E[expert])
    return held


def _numbered(packed: list[list[int]], old_RS: np.ndarray) -> np.ndarray:
    """[R, S]: each set of experts on the rank, and each expert in the slot, where most (and it) were before, as far as that goes."""
    old = [set(experts) for experts in old_RS.tolist()]
    pairs = sorted(((len(old[r] & set(p)), -r, -i) for r in range(len(old)) for i, p in enumerate(packed)), reverse=True)
    to: dict[int, int] = {}
    for _, r, i in pairs:
        if -r not in to and -i not in to.values():
            to[-r] = -i
    return np.array([_seated(packed[to[rank]], old_RS[rank].tolist()) for rank in range(len(old))])


def _seated(experts: list[int], old_S: list[int]) -> list[int]:
    """Those that were here keep their slots; the others take what is left, in order."""
    left = sorted(experts)
    seats: list[int | None] = []
    for expert in old_S:
        if expert in left:
            left.remove(expert)
            seats.append(expert)
        else:
            seats.append(None)
    return [left.pop(0) if seat is None else seat for seat in seats]
