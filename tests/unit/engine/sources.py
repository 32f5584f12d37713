"""A block source that tests steer: it has what other engines have computed, and brings it when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.engine.blocks import Blocks
from slipstream.engine.engine import EmbeddedEngine
from slipstream.types import GenerateRequest


@dataclass
class FakeFetch:
    into: Blocks
    payloads: list[np.ndarray | None]
    wake: Callable[[], None]
    arrived: int = 0
    over: bool = False
    """Nothing more will arrive."""
    cancelled: bool = False
    error: Exception | None = None
    written: int = 0
    writes: list[int] = field(default_factory=list)
    """Blocks that each call has copied."""

    @property
    def ready(self) -> bool:
        return not self.cancelled and (self.over or self.written < self.arrived)

    @property
    def done(self) -> bool:
        return self.over and self.written == self.arrived

    def arrive(self, count: int | None = None) -> None:
        """`count` more blocks are here (None: all, and that is the end)."""
        self.arrived = len(self.payloads) if count is None else self.arrived + count
        self.over = self.over or count is None
        self.wake()

    def write(self, blocks: Sequence[int], most: int) -> int:
        assert not self.cancelled
        if self.error:
            raise self.error
        before = self.written
        for i in range(self.written, min(self.arrived, self.written + most)):
            if (payload := self.payloads[i]) is None:
                self.arrived, self.over = i, True
                break
            self.into.write(blocks[i], payload)
            self.written = i + 1
        self.writes.append(self.written - before)
        return self.written

    def tier(self, index: int) -> str:
        return "peer"

    def cancel(self, late: bool) -> None:
        self.cancelled = True


@dataclass
class FakeSource:
    """`held` by key; a fetch starts complete when `at_once`."""

    into: Blocks
    held: dict[bytes, np.ndarray] = field(default_factory=dict)
    at_once: bool = False
    timeout_s: float = 1e9
    brings_tails: bool = False
    fetches: list[FakeFetch] = field(default_factory=list)
    asked: int = 0

    def find(self, request: GenerateRequest, keys: Sequence[bytes]) -> int:
        self.asked += 1
        count = 0
        while count < len(keys) and keys[count] in self.held:
            count += 1
        return count

    def start(self, request: GenerateRequest, keys: Sequence[bytes], wake: Callable[[], None]) -> FakeFetch:
        fetch = FakeFetch(self.into, [self.held[key].copy() for key in keys], wake)
        self.fetches.append(fetch)
        if self.at_once:
            fetch.arrive()
        return fetch


def held_by(engine: EmbeddedEngine) -> dict[bytes, np.ndarray]:
    """Everything that its prefix cache can find, by key."""
    prefix = engine._scheduler.prefix
    assert prefix is not None
    return {key: engine.blocks.read(block) for key, block in prefix._block_of.items()}


def with_source(engine: EmbeddedEngine, **options) -> FakeSource:
    source = FakeSource(engine.blocks, **options)
    engine.sources.append(source)
    return source
