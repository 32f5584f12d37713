"""An engine that dies and returns, loses replies, and changes weights in the middle of a completion."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from slipstream.errors import EngineUnavailable
from slipstream.fakes.world import FOREVER_S, HEALTHY, Faults, Trace
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion, Versions


class FakeEngine:
    """Samples random tokens at a constant pace; stamps each with the version that is live at that moment.

    Stands for a pool of replicas: after a death it returns with the version that was committed last, as serving.pool sees to.
    """

    def __init__(self, rng: random.Random, faults: Faults = HEALTHY, trace: Trace | None = None, token_s: float = 0.05):
        self.live: PolicyVersion | None = None
        self.prepared: PolicyVersion | None = None
        self.running = 0
        self.commits: list[int] = []
        self.is_up = asyncio.Event()
        self.is_up.set()
        self._rng = rng
        self._faults = faults
        self._trace = trace or Trace()
        self._token_s = token_s
        self._deaths = 0
        self._ids: set[str] = set()
        self._aborted: set[str] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """At most 12 tokens. Weights may change in the middle."""
        await self._call("generate")
        if self.live is None:
            raise EngineUnavailable("no weights yet")
        count = self._rng.randint(1, min(12, request.sampling.max_tokens))
        versions: list[tuple[int, int]] = []
        deaths = self._deaths
        self.running += 1
        self._ids.add(request.id)
        try:
            for chunk in _chunks(count, 6):
                await asyncio.sleep(chunk * self._token_s * self._rng.uniform(0.5, 2.0))
                if self._deaths != deaths or not self.is_up.is_set():
                    raise EngineUnavailable("the engine died")
                if request.id in self._aborted:
                    break
                versions.append((self.live.number, chunk))
            reason = "abort" if request.id in self._aborted else "stop"
        finally:
            self.running -= 1
            self._ids.discard(request.id)
            self._aborted.discard(request.id)
        tokens_N = np.array([self._rng.randrange(100) for _ in range(sum(n for _, n in versions))], np.int32)
        return Completion(request.id, tokens_N, np.full(len(tokens_N), -1.0, np.float32), _merge(versions), reason)

    async def prepare(self, version: PolicyVersion) -> None:
        await self._call("prepare")
        await asyncio.sleep(self._rng.uniform(0.05, 0.5))
        self.prepared = version
        await self._reply()

    async def commit(self, number: int) -> None:
        await self._call("commit")
        if self.live is None or self.live.number != number:
            if self.prepared is None or self.prepared.number != number:
                raise EngineUnavailable(f"version {number} is not prepared")
            self.live = self.prepared
            self.commits.append(number)
            self._trace(f"live {number}")
        await self._reply()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort")
        self._aborted |= self._ids & set(request_ids)

    async def state(self) -> EngineState:
        await self._call("state")
        await self._reply()
        number, fingerprint = (self.live.number, self.live.fingerprint) if self.live else (-1, "")
        return EngineState(number, fingerprint, running=self.running, kv_used_frac=min(1.0, self.running / 64))

    async def die(self, seconds: float) -> None:
        """Everything running fails, nothing answers for `seconds`, then the last committed version is live again."""
        self._trace("engine dies")
        self._deaths += 1
        self.is_up.clear()
        self.prepared = None
        await asyncio.sleep(seconds)
        self.is_up.set()
        self._trace("engine returns")

    async def _call(self, what: str) -> None:
        """The way to the engine."""
        if not self.is_up.is_set():
            raise EngineUnavailable(f"{what}: nobody answers")
        if self._rng.random() < self._faults.engine_fails:
            raise EngineUnavailable(f"{what}: connection reset")
        if self._rng.random() < self._faults.engine_lost:
            await asyncio.sleep(FOREVER_S)

    async def _reply(self) -> None:
        """The way back."""
        if self._rng.random() < self._faults.engine_lost:
            await asyncio.sleep(FOREVER_S)


def _chunks(count: int, size: int) -> list[int]:
    return [min(size, count - start) for start in range(0, count, size)]


def _merge(versions: Sequence[tuple[int, int]]) -> Versions:
    """Run-length segments with equal neighbours joined."""
    merged: list[tuple[int, int]] = []
    for version, count in versions:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        else:
            merged.append((version, count))
    return tuple(merged)
