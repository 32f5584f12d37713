"""Runs the engine's step loop inside an asyncio loop and hands its results to whoever waits for them.

One thread, no locks: a step is a plain call between two turns of the loop, so nothing observes the engine in the middle of one.
Knows nothing of HTTP; the server, and anything else that has an event loop, calls `generate` and `stream`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from slipstream.engine.handoff.exports import Export
from slipstream.engine.speculation import SpeculationCounts
from slipstream.errors import EngineBusy, EngineUnavailable
from slipstream.ports import Hear
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion, TokenPiece

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 5
"""Steps that may fail in a row before the process ends. More than `serving.pool.MOST_SENDS`, so that one request which fails every step is
given up before the engine is."""

MERGE_GAP_S = 0.02
"""Busy periods with a shorter pause between them are one span: a client needs that long to come back with its next turn."""

TURNS_A_STEP = 3
"""Turns of the event loop between two steps: reading a request, starting its handler and answering are one turn each. With a single turn
they would be a step apart, and every request would wait for two more steps."""


class StepResult(Protocol):
    """What one engine step did."""

    @property
    def finished(self) -> Sequence[Completion]: ...
    @property
    def tokens(self) -> Sequence[tuple[str, Any, Any]]:
        """(request id, new token ids, their logprobs) of the requests that got tokens."""
        ...


class SteppedEngine(Protocol):
    """What the driver needs: the embedded engine, or a scripted one in tests. Synchronous and single-threaded."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something: false while paused, but for aborted requests that wait to be answered."""
        ...

    on_ready: Callable[[], None]
    """The driver's: called from any thread when `has_work` may have become true though nobody called the engine."""

    @property
    def idle_s(self) -> float | None:
        """While there is no work: seconds until there may be some though nobody called; None: for ever."""
        ...

    @property
    def seq_len(self) -> int: ...
    def add(self, request: GenerateRequest, export: Export | None = None) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def step(self) -> StepResult: ...
    def recover(self) -> Sequence[str]:
        """After a step that raised: forget the requests whose state is lost, and return their ids. Raises when that is not enough."""
        ...

    def prepare(self, version: PolicyVersion) -> None: ...
    def commit(self, number: int) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def state(self) -> EngineState: ...
    @property
    def tokens_prefilled(self) -> int: ...
    @property
    def tokens_cached(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def speculation(self) -> SpeculationCounts: ...
    @property
    def kv_age_max(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def expert_load(self) -> np.ndarray: ...
    def block_values(self) -> Mapping[str, float]:
        """Metrics of where KV came from and where it went."""
        ...


class EngineDriver:
    """Owns one engine. `drive` must run as a task for anything to be answered."""

    def __init__(self, engine: SteppedEngine):
        self.engine = engine
        self._finish: dict[str, asyncio.Future[Completion]] = {}
        self._listeners: dict[str, Hear] = {}
        self._work = asyncio.Event()
        self._live = engine.state().live_version
        self._preparing = asyncio.Lock()
        self._failure: Exception | None = None
        self._spans: list[tuple[float, float]] = []
        self._abandoned: set[str] = set()
        """Requests that nobody waits for any more, whose completion has still to come out of a step."""
        self.draining = False
        """What it says to routers: that it should get no new requests. It refuses none."""
        self.failed_steps = 0
        """Steps that raised, since the start."""
        self._failed_in_a_row = 0
        self.handoffs: Counter[str] = Counter()
        """What `engine.handoff` has received and given, since the start."""
        self.prepare_s = 0.0
        """Seconds that the last prepare took; decoding went on."""
        self.commit_s = 0.0
        """Seconds for which the last commit held decoding up."""

    @property
    def ready(self) -> bool:
        """Whether a request can be answered: a version is live and the engine is not going down."""
        return self._failure is None and self._live >= 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Waits for the completion; cancelling aborts the request.

        Raises RequestError or EngineUnavailable, from the engine's `add` at once or from a failed step.
        """
        self._add(request)
        return await self._completion(request)

    async def prefill(self, request: GenerateRequest, export: Export) -> None:
        """As `generate`, for the KV blocks of the prompt, which go to `export` as they are filled."""
        self._add(request, export)
        await self._completion(request)

    def weights(self) -> tuple[int, str]:
        """Live version and fingerprint. From any thread."""
        state = self.engine.state()
        return state.live_version, state.fingerprint

    async def _completion(self, request: GenerateRequest) -> Completion:
        future = self._finish[request.id] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            del self._finish[request.id]
            if future.cancelled():
                self._abandon(request.id)

    async def stream(self, request: GenerateRequest, hear: Hear) -> Completion:
        """As `generate`; `hear` gets the tokens of each step but the last, whose tokens come with the completion."""
        if request.id not in self._finish:
            self._listeners[request.id] = hear
        try:
            return await self.generate(request)
        finally:
            if self._listeners.get(request.id) is hear:
                del self._listeners[request.id]

    async def prepare(self, version: PolicyVersion) -> None:
        """Loads in a worker thread while decoding goes on; one at a time."""
        async with self._preparing:
            started = time.perf_counter()
            await asyncio.to_thread(self.engine.prepare, version)
            self.prepare_s = time.perf_counter() - started

    async def commit(self, number: int) -> None:
        # between two steps by construction: the loop is here, so it is not in a step
        started = time.perf_counter()
        self.engine.commit(number)
        self.commit_s = time.perf_counter() - started
        self._live = number
        self._work.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._abort_now(request_ids)

    async def state(self) -> EngineState:
        return replace(self.engine.state(), draining=self.draining)

    def pause(self) -> None:
        """Stop stepping; requests are accepted and wait."""
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()
        self._work.set()

    async def drive(self) -> None:
        """Steps while there is work and sleeps until woken by `_add`, `commit`, `abort`, `resume`, the engine's `on_ready`, or `idle_s`.

        A step that raises costs the requests that were running: which of them is to blame is unknown, and so is what it wrote of their
        KV. Those that wait go on. After MAX_FAILED_STEPS in a row, or when the engine cannot recover, everybody gets EngineUnavailable
        and the error goes on to whoever runs this, which ends the process (a supervisor starts a clean one).
        """
        loop = asyncio.get_running_loop()
        self.engine.on_ready = lambda: _call_soon(loop, self._work.set)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.engine.idle_s):
                    await self._work.wait()
            self._work.clear()
            while self.engine.has_work:
                started = time.time()
                try:
                    result = self._step()
                    if result is not None:
                        self._dispatch(result)
                except Exception as error:
                    self.fail(error)
                    raise
                self._note_busy(started, time.time())
                for _ in range(TURNS_A_STEP):
                    await asyncio.sleep(0)

    def _step(self) -> StepResult | None:
        """One step; None when it failed and those who took part have been told. Raises after MAX_FAILED_STEPS in a row."""
        try:
            result = self.engine.step()
        except Exception as error:
            self.failed_steps += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row == MAX_FAILED_STEPS:
                raise
            lost = self.engine.recover()
            log.error("a step failed (%d in a row); %d running requests are lost", self._failed_in_a_row, len(lost), exc_info=error)
            self._refuse(lost, EngineUnavailable(f"a step of the engine failed: {type(error).__name__}: {error}; send the request again"))
            return None
        self._failed_in_a_row = 0
        return result

    def fail(self, error: Exception) -> None:
        """Answer everybody who waits, and refuse what comes: this engine is done."""
        self._failure = error
        self._refuse(list(self._finish), EngineUnavailable(f"the engine is going down: {type(error).__name__}: {error}"))

    def _refuse(self, request_ids: Sequence[str], error: EngineUnavailable) -> None:
        for request_id in request_ids:
            if (future := self._finish.get(request_id)) is not None and not future.done():
                future.set_exception(error)

    def more_values(self) -> dict[str, float]:
        """Metrics that not every engine has."""
        return {}

    def take_spans(self) -> list[tuple[float, float]]:
        """Busy periods (start, end in seconds since the epoch) since the last call, merged; a running one is cut here."""
        spans, self._spans = self._spans, []
        return spans

    def _add(self, request: GenerateRequest, export: Export | None = None) -> None:
        if self._failure is not None:
            raise EngineUnavailable(f"the engine is going down: {self._failure}")
        if request.id in self._finish:
            raise EngineBusy(f"id = {request.id!r}: a request with this id is still running; try again or use another id")
        if self._live < 0:
            raise EngineUnavailable("no policy version is live yet: prepare and commit one first")
        try:
            self.engine.add(request, export)
        except EngineUnavailable as error:
            raise EngineBusy(str(error)) from None
        self._work.set()

    def _abort_now(self, request_ids: Sequence[str]) -> None:
        self.engine.abort(request_ids)
        self._work.set()

    def _abandon(self, request_id: str) -> None:
        # the engine answers every request once; this answer must not reach a later request that has the same id
        if self._failure is None:
            self._abandoned.add(request_id)
            self._abort_now([request_id])

    def _dispatch(self, result: StepResult) -> None:
        if self._listeners:
            self._tell(result)
        for completion in result.finished:
            if completion.id in self._abandoned:
                self._abandoned.remove(completion.id)
            elif (future := self._finish.get(completion.id)) is not None and not future.done():
                future.set_result(completion)

    def _tell(self, result: StepResult) -> None:
        ending = {completion.id for completion in result.finished}
        for request_id, ids, logprobs in result.tokens:
            if (hear := self._listeners.get(request_id)) is not None and request_id not in ending and request_id not in self._abandoned:
                hear(TokenPiece(np.array(ids, np.int32), np.array(logprobs, np.float32), self._live))

    def _note_busy(self, start: float, end: float) -> None:
        if self._spans and start - self._spans[-1][1] < MERGE_GAP_S:
            start = self._spans.pop()[0]
        self._spans.append((start, end))


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """From any thread; nothing when the loop has ended meanwhile."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
