"""The Engine port over one vLLM server: requests in, completions out, and policy versions that are verified before they are live.

    commit:  new requests wait -> vLLM stands still -> loads -> goes on -> canary -> live, and those requests are sent
                                                                        -> the old version again, and the update is refused

What ran between the load and the canary may have been sampled from wrong weights: its answers are held until the verdict, and when that is
no they are not delivered. Knows no HTTP server of ours and no process. Must be used from one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from slipstream.errors import EngineBusy, EngineError, EngineUnavailable
from slipstream.ports import Hear
from slipstream.serving.vllm import calls
from slipstream.serving.vllm.api import Api, LoadFailed
from slipstream.serving.vllm.canary import Verdict, compare
from slipstream.serving.vllm.published import verify_fits
from slipstream.serving.vllm.rows import RowFetcher
from slipstream.serving.vllm.scrape import samples
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion, Timings, TokenPiece

log = logging.getLogger(__name__)

ABORT_AGAIN_S, ABORT_TIMEOUT_S = 0.02, 30.0
"""vLLM forgets an abort that overtakes its request: it is repeated until the request has ended."""

Ask = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""A body of calls.body -> vLLM's answer."""
Reference = Callable[[str, Sequence[np.ndarray]], list[np.ndarray]]
"""(weights folder, prompts) -> logprobs of each prompt's tokens but the first."""


class UpdateRefused(EngineError):
    """The new version is not live; what was before still is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    seq_len: int
    vocab_size: int
    stop_ids: frozenset[int]
    """End-of-sequence ids of the model: the same for every engine, whatever vLLM reads from the folder."""
    in_flight: int
    """Requests beyond this many are refused."""


@dataclass(frozen=True, slots=True)
class Canary:
    prompts: Sequence[np.ndarray]
    reference: Reference
    tolerance: float


@dataclass(eq=False, slots=True)
class _Call:
    sent: bool = False
    aborted: bool = False
    spoiled: bool = False
    """It ran under weights that turned out to be wrong."""
    answered: bool = False
    salt: int = 0


@dataclass(frozen=True, slots=True)
class _Prepared:
    version: PolicyVersion
    logprobs: Sequence[np.ndarray]


class VllmEngine:
    """Implements ports.Engine. `broken` is set when the server is of no more use."""

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
        self.broken = asyncio.Event()
        self.draining = False
        """What it says to routers: that it should get no new requests. It refuses none."""
        self.commit_s = self.prepare_s = 0.0
        self.last_verdict: Verdict | None = None
        self.refused_updates = 0
        self.spans: list[tuple[float, float]] = []
        """Busy periods that have ended (seconds since the epoch); the reader empties it."""
        self._api, self._limits, self._shapes, self._on_update = api, limits, shapes, on_update
        self._canary, self._rows = canary, rows
        self._live: _Prepared | None = None
        self._prepared: _Prepared | None = None
        self._calls: dict[str, _Call] = {}
        self._updating, self._preparing = asyncio.Lock(), asyncio.Lock()
        self._open, self._paused, self._stamp = True, False, 0
        self._changed = asyncio.Event()
        self._started_s = self._busy_since = time.perf_counter()
        self._busy_s, self._was_busy = 0.0, False
        self._canaries = 0

    # ---- requests ----

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ports.Engine. Raises EngineBusy when too many are in flight, or one with this id is."""
        return await self._answer(request, self._api.generate)

    async def stream(self, request: GenerateRequest, hear: Hear) -> Completion:
        """See ports.StreamingEngine. Nothing more is heard once an update begins: vLLM says only at the end what sampled which token."""
        return await self._answer(request, partial(self._stream, request, hear))

    async def _answer(self, request: GenerateRequest, ask: Ask) -> Completion:
        calls.check(request, self._limits)
        if self._live is None:
            raise EngineUnavailable("no policy version is live yet: prepare and commit one first")
        if request.id in self._calls:
            raise EngineBusy(f"id = {request.id!r}: a request with this id is still running; try again or use another id")
        if len(self._calls) >= self._limits.in_flight:
            raise EngineBusy(f"request {request.id}: {len(self._calls)} requests are in flight already; try again later")
        call = self._calls[request.id] = _Call(salt=request.salt)
        self._note_busy()
        try:
            return await self._serve(request, call, ask)
        finally:
            del self._calls[request.id]
            call.answered = True
            self._note_busy()

    async def _serve(self, request: GenerateRequest, call: _Call, ask: Ask) -> Completion:
        queued = time.perf_counter()
        await self._until(lambda: self._open or call.aborted)
        if call.aborted:
            return calls.nothing(request)
        call.sent, sent = True, time.perf_counter()
        answer = await ask(calls.body(request, self._limits))
        completion = calls.completion(request, answer, Timings(queued_s=sent - queued, decode_s=time.perf_counter() - sent))
        call.answered = True
        await self._until(lambda: self._open)  # a verdict is pending
        if call.spoiled or self.broken.is_set():
            raise EngineUnavailable(f"request {request.id}: sampled from weights that failed verification; send it again")
        if self._rows is None:
            return completion
        return calls.with_routing(completion, await self._rows.fetch(request, len(completion.tokens_N)))

    async def _stream(self, request: GenerateRequest, hear: Hear, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer. Tokens are heard while it is certain that the version live at its beginning sampled them."""
        began, pieces = self._stamp, []

        def note(piece: dict[str, Any]) -> None:
            pieces.append(piece)
            choice = next(iter(piece["choices"]), None)
            if choice is not None and choice["finish_reason"] is None and self._open and self._stamp == began:
                hear(TokenPiece(*calls.tokens_of(request, choice), began))

        await self._api.stream(body, note)
        return calls.joined(pieces)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See ports.Engine. Returns once they have ended. Raises EngineUnavailable when vLLM does not end them."""
        found = {name: self._calls[name] for name in request_ids if name in self._calls}
        for call in found.values():
            call.aborted = True
        self._wake()
        await self._end(found)

    async def _end(self, found: Mapping[str, _Call]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while left := [name for name, call in found.items() if call.sent and not call.answered]:
                    await self._api.abort(left)
                    await asyncio.sleep(ABORT_AGAIN_S)
        except TimeoutError:
            raise EngineUnavailable(f"vLLM has not ended aborted requests within {ABORT_TIMEOUT_S:g} s") from None

    # ---- weights ----

    async def prepare(self, version: PolicyVersion) -> None:
        """Verify the files and compute what the canary must say, in a thread, while decoding goes on. vLLM does not know of it yet."""
        async with self._preparing:
            known = [entry.version for entry in (self._prepared, self._live) if entry is not None]
            if version in known or any((v.number, v.fingerprint) == (version.number, version.fingerprint) for v in known):
                return
            started = time.perf_counter()
            await asyncio.to_thread(verify_fits, version, self._shapes)
            logprobs: Sequence[np.ndarray] = ()
            if self._canary is not None:
                logprobs = await asyncio.to_thread(self._canary.reference, version.path, self._canary.prompts)
            self._prepared = _Prepared(version, logprobs)
            self.prepare_s = time.perf_counter() - started

    async def commit(self, number: int) -> None:
        """Load, verify, go live. Raises UpdateRefused when the engine does not compute what it should; then the old version is live again.

        A caller that goes away does not stop it half-way.
        """
        await asyncio.shield(asyncio.ensure_future(self._commit(number)))

    async def _commit(self, number: int) -> None:
        async with self._updating:
            ready, live = self._prepared, self._live
            if ready is None or ready.version.number != number:
                if live is not None and live.version.number == number:
                    return
                names = [None if entry is None else entry.version.number for entry in (ready, live)]
                raise EngineError(f"cannot commit policy version {number}: prepared is {names[0]}, live is {names[1]}; prepare it first")
            if self._paused:
                raise EngineUnavailable(f"cannot commit policy version {number} while paused: it could not be verified; resume first")
            started = time.perf_counter()
            self._open = False
            try:
                await self._replace(ready)
            except UpdateRefused:
                raise
            except BaseException:
                self.broken.set()  # what the server computes with is unknown
                raise
            finally:
                if self._prepared is ready:
                    self._prepared = None
                self._open = True
                self._wake()
                self.commit_s = time.perf_counter() - started

    async def _replace(self, new: _Prepared) -> None:
        problem = await self._try(new)
        if problem is None:
            self._live = new
            return
        self.refused_updates += 1
        log.error("policy version %d is refused: %s", new.version.number, problem)
        spoiled = {name: call for name, call in self._calls.items() if call.sent}
        for call in spoiled.values():
            call.spoiled = True
        await self._end(spoiled)
        await self._api.forget_prefixes()
        old = self._live
        if old is not None and (again := await self._try(old)) is not None:
            raise EngineUnavailable(f"policy version {new.version.number} was refused ({problem}), and {old.version.number} fails: {again}")
        kept = "none" if old is None else old.version.number
        raise UpdateRefused(f"policy version {new.version.number} is refused, live is {kept}: {problem}")

    async def _try(self, entry: _Prepared) -> str | None:
        """Load it and ask the canary. None when it computes what it should, else why not."""
        version = entry.version
        await self._api.pause("abort" if self._on_update == "abort" else "keep")
        try:
            await self._api.update_weights(version.path, version.fingerprint, str(version.number))
            if self._on_update == "recompute":
                await self._api.forget_prefixes(recompute_running=True)
        except LoadFailed as error:
            return str(error)
        finally:
            await self._api.resume()
        self._stamp = version.number
        if self._canary is None:
            return None
        self.last_verdict = compare(await self._sing(self._canary.prompts), entry.logprobs, self._canary.tolerance)
        if self.last_verdict.ok:
            return None
        return f"the engine does not compute what its weights say: {self.last_verdict} (engine.canary_tolerance)"

    async def _sing(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the engine says of the canary prompts, past every cache and every queue."""
        self._canaries += 1
        bodies = [calls.canary_body(f"canary-{self._canaries}-{i}", prompt_T) for i, prompt_T in enumerate(prompts)]
        answers = await asyncio.gather(*(self._api.generate(body) for body in bodies))
        return [calls.prompt_logprobs(prompt_T, answer) for prompt_T, answer in zip(prompts, answers, strict=True)]

    # ---- control and what it says about itself ----

    async def pause(self) -> None:
        await self._api.pause("keep")
        self._paused = True

    async def resume(self) -> None:
        await self._api.resume()
        self._paused = False

    async def state(self) -> EngineState:
        found = samples(await self._api.metrics())
        inside = sum(call.sent and not call.answered for call in self._calls.values())  # its own count is that of its last step
        waiting = min(inside, int(found["vllm:num_requests_waiting"]))
        live = None if self._live is None else self._live.version
        return EngineState(
            live_version=-1 if live is None else live.number,
            fingerprint="" if live is None else live.fingerprint,
            prepared_version=None if self._prepared is None else self._prepared.version.number,
            running=inside - waiting,
            waiting=waiting + sum(not call.sent for call in self._calls.values()),
            kv_used_frac=found["vllm:kv_cache_usage_perc"],
            paused=self._paused,
            generated_tokens=int(found["vllm:generation_tokens_total"]),
            busy_s=self.busy_s,
            uptime_s=time.perf_counter() - self._started_s,
            draining=self.draining,
        )

    @property
    def ready(self) -> bool:
        return self._live is not None and not self.broken.is_set()

    @property
    def busy_s(self) -> float:
        """Seconds with a request in flight: vLLM does not say when it computes."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._calls else 0.0)

    @property
    def kv_age_max(self) -> int:
        """Policy versions between the live one and the oldest start of a rollout in flight: an upper bound."""
        salts = [call.salt for call in self._calls.values()]
        return max(0, self._stamp - min(salts)) if salts else 0

    def _note_busy(self) -> None:
        """Called right after the number of calls changed."""
        now = time.perf_counter()
        if self._was_busy and not self._calls:
            self._busy_s += now - self._busy_since
            self.spans.append((time.time() - (now - self._busy_since), time.time()))
        elif self._calls and not self._was_busy:
            self._busy_since = now
        self._was_busy = bool(self._calls)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
