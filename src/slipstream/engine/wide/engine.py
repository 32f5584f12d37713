"""The embedded engine as one rank of several: requests, attention and KV cache of its own, experts shared with the others.

All ranks step together. A step begins with a vote, one small all-reduce: who has work, which policy version is wanted. Then each runs its
own requests, or none: experts are served either way. When nobody has work all fall asleep after the same vote; whoever gets a request
rings for the next one. What must be the same everywhere happens between a vote and the step behind it, where all ranks have decided it
from the same numbers: new weights go live, experts move.

    asleep --(a request, a commit, a ring)--> vote --(somebody has work)--> step --> vote ... --(nobody has)--> asleep

A step that raises here still serves the layers that are left, and costs the requests of this rank only. A rank that is lost breaks the
group: every step raises from then on, `recover` too, and the process ends (`EngineDriver.drive`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from slipstream.config.serve import EngineConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.postprocess import StepResult
from slipstream.engine.wide.bell import Bell
from slipstream.engine.wide.fit import check_wide
from slipstream.engine.wide.weights import WideWeights
from slipstream.errors import EngineUnavailable
from slipstream.models.impl import Impl
from slipstream.models.spec import ModelSpec
from slipstream.parallel.placement import better, imbalance, place, slots_per_rank
from slipstream.parallel.wide import WideExperts, WideGroup
from slipstream.types import PolicyVersion


class WideEngine(EmbeddedEngine):
    """Made by all ranks together. `commit` only asks for a version; `on_commit(number)` says when it is live, on every rank."""

    def __init__(self, group: WideGroup, folder: str | Path, config: EngineConfig, seq_len: int, seed: int = 0, version: int = 0) -> None:
        spec, ep = ModelSpec.from_folder(Path(folder)), config.ep
        check_wide(spec, config)
        slots = slots_per_rank(spec.num_experts, group.size, ep.redundant_experts)
        even = place(np.zeros((len(spec.moe_layers), spec.num_experts)), group.size, slots)
        self.group, self.shared = group, WideExperts(group, even, spec.num_experts)
        super().__init__(folder, config, seq_len, seed, version)
        self.bell = Bell(group, config.host)
        self.on_commit: Callable[[int], None] = lambda number: None
        self._awake = False
        self._asked = False
        """Something has to be put to the vote although nobody may have work."""
        self._votes = 0
        self._pending: PolicyVersion | None = None
        self._placing = threading.Lock()
        """Held while a version is being prepared: its experts go to where they are placed now."""
        self._since_placed = 0
        self._seen_LE = np.zeros_like(self.shared.load_LE)
        self._seen_L = np.zeros_like(self.shared.served_L)
        self._recent_LE = np.zeros(self.shared.load_LE.shape)
        self.vote_s = 0.0
        """Seconds spent waiting for the others in votes."""
        self.idle_steps = 0
        """Steps in which this rank had no token of its own."""
        self.imbalance = self.imbalance_before = 1.0
        """Pairs computed by the busiest rank over the mean: since experts were last looked at, and before they last moved."""
        self.rebalances = self.moved_experts = 0

    def _load_weights(self, dtype: torch.dtype, version: int, impl: Impl) -> WideWeights:
        weights = WideWeights(self.folder, dtype, version, self.shared)
        self._wide = weights
        return weights

    def close(self) -> None:
        super().close()
        self.bell.close()

    # ---- the step ----

    @property
    def has_work(self) -> bool:
        return self._awake or self._asked or super().has_work

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Vote, then take part in the step that was agreed on. Waits for all ranks. Raises EngineUnavailable when one is lost."""
        if not self._vote():
            return super().step()  # nothing runs; what was aborted is handed out
        self.shared.begin()
        try:
            return super().step()
        finally:
            self.idle_steps += self.shared.done == 0
            if self.group.broken is None:
                self.shared.finish(self._wide.serving())

    def recover(self) -> list[str]:
        """See `EmbeddedEngine`. Raises EngineUnavailable: the group is broken."""
        if self.group.broken is not None:
            raise self.group.broken
        return super().recover()

    def heard(self) -> bool:
        """Look who rang. Whether this rank has to wake up."""
        rung = self.bell.heard() > self._votes  # nobody can ring for the vote after the next one: that needs this rank
        self._awake = self._awake or rung
        return self._awake

    def _vote(self) -> bool:
        """Whether a step follows. New weights and places that all agree on take effect here."""
        due = 0 < self.config.ep.rebalance_steps <= self._since_placed
        held = due and self._placing.acquire(blocking=False)
        try:
            free = held and self._wide.prepared is None  # in this order: it may be prepared just now, in another thread
            began = time.perf_counter()
            if not self._awake:
                self.bell.ring(self._votes + 1)
            wanted = self._pending or PolicyVersion(self._weights.number, self._weights.fingerprint, None, "")
            key = (wanted.number, int(wanted.fingerprint[:15] or "0", 16))
            work = int(super().has_work)
            most = self.group.largest([work, int(not free), *key, *(-value for value in key)])
            self._votes, self._asked, self._awake = self._votes + 1, False, bool(most[0])
            self._since_placed += most[0]
            self.vote_s += time.perf_counter() - began
            if key == tuple(most[2:4]) == tuple(-value for value in most[4:]):
                self._go_live()
            if due and not most[1]:
                self._place()
        finally:
            if held:
                self._placing.release()
        return self._awake

    # ---- weights ----

    def prepare(self, version: PolicyVersion) -> None:
        if version == self._pending:
            return
        with self._placing:
            if self._pending is not None:
                raise EngineUnavailable(
                    f"policy version {version.number} cannot be prepared while version {self._pending.number} is being committed: try again"
                )
            super().prepare(version)

    def commit(self, number: int) -> None:
        """Ask for the prepared version. It goes live before the first step of which all ranks have asked for it. Idempotent.

        Raises EngineError when it is not prepared, EngineUnavailable while another one is being prepared.
        """
        prepared = self._weights.prepared
        if number == self.pending or (prepared is None and number == self._weights.number):
            return
        if prepared is None or prepared.number != number:
            super().commit(number)  # live already, or it says what is prepared
            return
        if self._placing.locked():
            raise EngineUnavailable(f"policy version {number} cannot be committed while another one is being prepared: try again")
        self._pending, self._asked = prepared, True

    @property
    def pending(self) -> int | None:
        """The version that this rank has asked for, and that is not live yet."""
        return None if self._pending is None else self._pending.number

    def withdraw(self, number: int) -> None:
        """No longer ask for a version that some ranks were never asked for."""
        if number == self.pending:
            self._pending = None

    def _go_live(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            super().commit(pending.number)
            self.on_commit(pending.number)

    # ---- places ----

    def _place(self) -> None:
        """Look at the load of all ranks since the last time, and move experts when that is worth it. All ranks do this together."""
        load_LE, served_L = self.shared.load_LE - self._seen_LE, self.shared.served_L - self._seen_L
        served_LR = np.zeros((len(served_L), self.group.size), np.int64)
        served_LR[:, self.group.rank] = served_L
        total = self.group.add_up(np.concatenate([load_LE.ravel(), served_LR.ravel()]))
        self._seen_LE, self._seen_L = self.shared.load_LE.copy(), self.shared.served_L.copy()
        self._since_placed = 0
        self.imbalance = imbalance(total[load_LE.size :].reshape(served_LR.shape))
        self._recent_LE = total[: load_LE.size].reshape(load_LE.shape) + self._recent_LE / 2
        found = better(self._recent_LE, self.shared.placement, self.config.ep.rebalance_gain)
        if found is not None:
            self.imbalance_before = self.imbalance
            self.moved_experts += self._wide.move(found)
            self.rebalances += 1
