"""One fetch from the tiers: payloads in host memory, filled by the reader thread and copied to the device by the engine's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.engine.blocks import Blocks
from slipstream.engine.tiers.index import Place


class TierFetch:
    """See `engine.fetch.Fetch`. The engine's thread is woken once, when everything is there or nothing more will come."""

    def __init__(self, blocks: Blocks, count: int, wake: Callable[[], None], counts: Counter[str]) -> None:
        self.limit = count
        """Blocks from here on do not come."""
        self.arrived = False
        """Everything that will come is there."""
        self.cancelled = False
        self._blocks, self._wake, self._counts = blocks, wake, counts
        self._payloads: list[np.ndarray | None] = [None] * count
        self._tiers = [""] * count
        self._written = 0
        self.on_late: Callable[[], None] = lambda: None
        """Called when its time is up before everything is there."""

    @property
    def ready(self) -> bool:
        return self.arrived

    @property
    def done(self) -> bool:
        return self.arrived and self._next() is None

    def _next(self) -> np.ndarray | None:
        return self._payloads[self._written] if self._written < self.limit else None

    def write(self, blocks: Sequence[int], most: int) -> int:
        end = self._written + most
        while self._written < end and (payload := self._next()) is not None:
            self._blocks.write(blocks[self._written], payload)
            tier = self._tiers[self._written]
            self._counts[f"{tier}/hit_tokens"] += self._blocks.block_tokens
            self._counts[f"{tier}/read_bytes"] += payload.nbytes
            self._written += 1
        return self._written

    def tier(self, index: int) -> str:
        return self._tiers[index]

    def cancel(self, late: bool) -> None:
        self.cancelled = True
        if late and not self.arrived:
            self.on_late()

    # ---- called by the hierarchy ----

    def deliver(self, index: int, payload: np.ndarray, tier: str) -> None:
        self._tiers[index] = tier
        self._payloads[index] = payload

    def finish(self) -> None:
        self.arrived = True
        if not self.cancelled:
            self._wake()


@dataclass(slots=True)
class Work:
    """What the reader has to load for a fetch: (index, key, tier, place) in order."""

    fetch: TierFetch
    items: list[tuple[int, bytes, str, Place]] = field(default_factory=list)
