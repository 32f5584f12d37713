"""The Engine port over one vLLM server: requests in, completions out. Policy versions go live in `updates`.

Knows no HTTP server of ours and no process. Must be used from one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.errors import EngineBusy, EngineUnavailable
from slipstream.ports import Hear
from slipstream.serving.vllm import calls
from slipstream.serving.vllm.api import Api
from slipstream.serving.vllm.flights import Flight, Flights
from slipstream.serving.vllm.rows import RowFetcher
from slipstream.serving.vllm.scrape import kv_cache, samples
from slipstream.serving.vllm.told import Told
from slipstream.serving.vllm.updates import Canary, Updates
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion, Timings

Ask = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""A body of calls.body -> vLLM's answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    seq_len: int
    vocab_size: int
    stop_ids: frozenset[int]
    """End-of-sequence ids of the model: the same for every engine, whatever vLLM reads from the folder."""
    in_flight: int
    """Requests beyond this many are refused."""


class VllmEngine:
    """Implements ports.Engine."""

    def __init__(
        self,
        api: Api,
        limits: Limits,
        shapes: Mapping[str, tuple[int, ...]],
        on_update: str = "keep",
        canary: Canary | None = None,
        rows: RowFetcher | None = None,
    ):
        """`shapes`: of every tensor that a version must have, and no other. Nothing is live until the first commit."""
        self.draining = False
        """What it says to routers: that it should get no new requests. It refuses none."""
        self.flights = Flights(api)
        self.updates = Updates(api, self.flights, shapes, on_update, canary)
        self._api, self._limits, self._rows = api, limits, rows
        self._started_s = time.perf_counter()

    # ---- requests ----

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ports.Engine. Raises EngineBusy when too many are in flight, or one with this id is."""
        return await self._answer(request, self._api.generate)

    async def stream(self, request: GenerateRequest, hear: Hear) -> Completion:
        """See ports.StreamingEngine. While an update is loaded and verified nothing is heard; what waits is heard after the verdict."""
        return await self._answer(request, partial(self._stream, request, hear))

    async def _answer(self, request: GenerateRequest, ask: Ask) -> Completion:
        calls.check(request, self._limits)
        if self.updates.live is None:
            raise EngineUnavailable("no policy version is live yet: prepare and commit one first")
        if request.id in self.flights.by_id:
            raise EngineBusy(f"id = {request.id!r}: a request with this id is still running; try again or use another id")
        if (count := len(self.flights.by_id)) >= self._limits.in_flight:
            raise EngineBusy(f"request {request.id}: {count} requests are in flight already; try again later")
        with self.flights.flight(request.id, request.salt) as flight:
            return await self._serve(request, flight, ask)

    async def _serve(self, request: GenerateRequest, flight: Flight, ask: Ask) -> Completion:
        queued = time.perf_counter()
        await self.flights.until(lambda: self.flights.open or flight.aborted)
        if flight.aborted:
            return calls.nothing(request)
        flight.sent, sent = True, time.perf_counter()
        answer = await ask(calls.body(request, self._limits))
        completion = calls.completion(request, answer, Timings(queued_s=sent - queued, decode_s=time.perf_counter() - sent))
        flight.answered = True
        await self.flights.until(lambda: self.flights.open)  # a verdict is pending
        if flight.spoiled or self.updates.broken.is_set():
            raise EngineUnavailable(f"request {request.id}: sampled from weights that failed verification; send it again")
        if self._rows is None:
            return completion
        return calls.with_routing(completion, await self._rows.fetch(request, len(completion.tokens_N)))

    async def _stream(self, request: GenerateRequest, hear: Hear, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer. Every token that is heard was sampled by a verified version."""
        flights, updates = self.flights, self.updates
        flight, told = flights.by_id[request.id], Told(request, hear, self._api.spans, updates.stamp, updates.count)

        async def note(piece: dict[str, Any]) -> None:
            told.add(piece)
            await flights.until(lambda: flights.open or flight.aborted or flight.spoiled)
            if flights.open and not (flight.spoiled or updates.broken.is_set()):
                await told.tell(updates.stamp, updates.count)

        await self._api.stream(body, note)
        return calls.joined(told.pieces)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See ports.Engine. Returns once they have ended. Raises EngineUnavailable when vLLM does not end them."""
        await self.flights.abort(request_ids)

    async def prepare(self, version: PolicyVersion) -> None:
        """See ports.Engine and `Updates.prepare`."""
        await self.updates.prepare(version)

    async def commit(self, number: int) -> None:
        """See ports.Engine and `Updates.commit`."""
        await self.updates.commit(number)

    # ---- control and what it says about itself ----

    async def pause(self) -> None:
        await self._api.pause("keep")
        self.updates.paused = True

    async def resume(self) -> None:
        await self._api.resume()
        self.updates.paused = False

    async def state(self) -> EngineState:
        text = await self._api.metrics()
        found, (block_tokens, kv_tokens) = samples(text), kv_cache(text)
        flights, updates = self.flights.by_id.values(), self.updates
        inside = sum(flight.sent and not flight.answered for flight in flights)  # its own count is that of its last step
        waiting = min(inside, int(found["vllm:num_requests_waiting"]))
        live, prepared = (None if entry is None else entry.version for entry in (updates.live, updates.prepared))
        return EngineState(
            live_version=-1 if live is None else live.number,
            fingerprint="" if live is None else live.fingerprint,
            prepared_version=None if prepared is None else prepared.number,
            running=inside - waiting,
            waiting=waiting + sum(not flight.sent for flight in flights),
            kv_used_frac=found["vllm:kv_cache_usage_perc"],
            paused=updates.paused,
            generated_tokens=int(found["vllm:generation_tokens_total"]),
            busy_s=self.flights.busy_s,
            uptime_s=time.perf_counter() - self._started_s,
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
            draining=self.draining,
        )

    @property
    def ready(self) -> bool:
        return self.updates.live is not None and not self.updates.broken.is_set()

    @property
    def kv_age_max(self) -> int:
        """Policy versions between the live one and the oldest start of a rollout in flight: an upper bound."""
        salts = [flight.salt for flight in self.flights.by_id.values()]
        return max(0, self.updates.stamp - min(salts)) if salts else 0
