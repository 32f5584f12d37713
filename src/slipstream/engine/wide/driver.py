"""`EngineDriver` over one rank of several: it wakes up when another rank rings, and a commit waits for the others."""

from __future__ import annotations

import asyncio
import contextlib
import time

from slipstream.engine.driver import EngineDriver
from slipstream.engine.wide.engine import WideEngine
from slipstream.errors import EngineUnavailable


class WideDriver(EngineDriver):
    """See `EngineDriver`."""

    def __init__(self, engine: WideEngine) -> None:
        super().__init__(engine)
        self._wide = engine
        self._committed = asyncio.Event()
        engine.on_commit = self._note_live

    async def commit(self, number: int) -> None:
        """Waits until the version is live, which is when every rank has been asked for it.

        Raises EngineError: it is not prepared; EngineUnavailable: not all ranks were asked within engine.ep.timeout_s; the old one stays.
        """
        started = time.perf_counter()
        self._wide.commit(number)
        self._work.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wide.group.timeout_s):
                while self._wide.pending == number and self._failure is None:
                    self._committed.clear()
                    await self._committed.wait()
        self._wide.withdraw(number)
        live = self._wide.state().live_version
        if self._failure is not None:
            raise EngineUnavailable(f"the engine is going down: {self._failure}")
        if live != number:
            raise EngineUnavailable(
                f"policy version {number} was not committed: not all {self._wide.group.size} ranks were asked for it within "
                f"{self._wide.group.timeout_s:g} s (engine.ep.timeout_s); version {live} stays"
            )
        self.commit_s = time.perf_counter() - started

    async def drive(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._wide.bell, self._hear)
        try:
            await super().drive()
        finally:
            loop.remove_reader(self._wide.bell)
            self._committed.set()

    def more_values(self) -> dict[str, float]:
        engine, shared = self._wide, self._wide.shared
        values: dict[str, float] = {
            "engine/ep/vote_s": engine.vote_s,
            "engine/ep/idle_steps": engine.idle_steps,
            "engine/ep/served_pairs": int(shared.served_L.sum()),
            "engine/ep/imbalance": engine.imbalance,
            "engine/ep/imbalance_before": engine.imbalance_before,
            "engine/ep/rebalances": engine.rebalances,
            "engine/ep/moved_experts": engine.moved_experts,
        }
        for layer in range(len(shared.served_L)):
            values[f"engine/ep/dispatch_s/{layer}"] = float(shared.dispatch_s_L[layer])
            values[f"engine/ep/compute_s/{layer}"] = float(shared.compute_s_L[layer])
            values[f"engine/ep/combine_s/{layer}"] = float(shared.combine_s_L[layer])
        return values

    def _hear(self) -> None:
        if self._wide.heard():
            self._work.set()

    def _note_live(self, number: int) -> None:
        self._live = number
        self._committed.set()
