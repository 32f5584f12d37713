"""Policy versions of a vLLM server: each is verified, by its files and by what the engine computes, before it is live.

    commit:  new requests wait -> vLLM stands still -> loads -> goes on -> canary -> live, and those requests are sent
                                                                        -> the old version again, and the update is refused

What ran between the load and the canary may have been sampled from wrong weights: its answers are held until the verdict, and when that is
no they are not delivered (`flights`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.errors import EngineError, EngineUnavailable
from slipstream.serving.vllm import calls
from slipstream.serving.vllm.api import Api, LoadFailed
from slipstream.serving.vllm.canary import Verdict, compare
from slipstream.serving.vllm.flights import Flights
from slipstream.serving.vllm.published import verify_fits
from slipstream.types import PolicyVersion

log = logging.getLogger(__name__)

Reference = Callable[[str, Sequence[np.ndarray]], list[np.ndarray]]
"""(weights folder, prompts) -> logprobs of each prompt's tokens but the first."""


class UpdateRefused(EngineError):
    """The new version is not live; what was before still is."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Prompts, what they should give, and how far the engine may be from it."""

    prompts: Sequence[np.ndarray]
    reference: Reference
    tolerance: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version, and what the canary must say of it."""

    version: PolicyVersion
    logprobs: Sequence[np.ndarray]


class Updates:
    """Which version is live, and how the next one gets there."""

    def __init__(self, api: Api, flights: Flights, shapes: Mapping[str, tuple[int, ...]], on_update: str, canary: Canary | None) -> None:
        """`shapes`: of every tensor that a version must have, and no other. Nothing is live until the first commit."""
        self.live: Prepared | None = None
        self.prepared: Prepared | None = None
        self.paused = False
        """Whether vLLM stands still because somebody asked for it: then nothing can be verified."""
        self.stamp = self.count = 0
        """The version that vLLM samples from now, live or not; and how many were loaded until it was."""
        self.broken = asyncio.Event()
        """Set when the server is of no more use."""
        self.last_verdict: Verdict | None = None
        self.refused = 0
        self.commit_s = self.prepare_s = 0.0
        self._api, self._flights, self._shapes, self._on_update, self._canary = api, flights, shapes, on_update, canary
        self._updating, self._preparing = asyncio.Lock(), asyncio.Lock()
        self._canaries = 0

    async def prepare(self, version: PolicyVersion) -> None:
        """Verify the files and compute what the canary must say, in a thread, while decoding goes on. vLLM does not know of it yet."""
        async with self._preparing:
            known = [entry.version for entry in (self.prepared, self.live) if entry is not None]
            if version in known or any((v.number, v.fingerprint) == (version.number, version.fingerprint) for v in known):
                return
            started = time.perf_counter()
            await asyncio.to_thread(verify_fits, version, self._shapes)
            logprobs: Sequence[np.ndarray] = ()
            if self._canary is not None:
                logprobs = await asyncio.to_thread(self._canary.reference, version.path, self._canary.prompts)
            self.prepared = Prepared(version, logprobs)
            self.prepare_s = time.perf_counter() - started

    async def commit(self, number: int) -> None:
        """Load, verify, go live. Raises UpdateRefused when the engine does not compute what it should; then the old version is live again.

        A caller that goes away does not stop it half-way.
        """
        await asyncio.shield(asyncio.ensure_future(self._commit(number)))

    async def _commit(self, number: int) -> None:
        async with self._updating:
            ready, live = self.prepared, self.live
            if ready is None or ready.version.number != number:
                if live is not None and live.version.number == number:
                    return
                names = [None if entry is None else entry.version.number for entry in (ready, live)]
                raise EngineError(f"cannot commit policy version {number}: prepared is {names[0]}, live is {names[1]}; prepare it first")
            if self.paused:
                raise EngineUnavailable(f"cannot commit policy version {number} while paused: it could not be verified; resume first")
            started = time.perf_counter()
            self._flights.shut()
            try:
                await self._replace(ready)
            except UpdateRefused:
                raise
            except BaseException:
                self.broken.set()  # what the server computes with is unknown
                raise
            finally:
                if self.prepared is ready:
                    self.prepared = None
                self._flights.reopen()
                self.commit_s = time.perf_counter() - started

    async def _replace(self, new: Prepared) -> None:
        problem = await self._try(new)
        if problem is None:
            self.live = new
            return
        self.refused += 1
        log.error("policy version %d is refused: %s", new.version.number, problem)
        await self._flights.spoil()
        await self._api.forget_prefixes()
        old = self.live
        if old is not None and (again := await self._try(old)) is not None:
            raise EngineUnavailable(f"policy version {new.version.number} was refused ({problem}), and {old.version.number} fails: {again}")
        kept = "none" if old is None else old.version.number
        raise UpdateRefused(f"policy version {new.version.number} is refused, live is {kept}: {problem}")

    async def _try(self, entry: Prepared) -> str | None:
        """Load it and ask the canary. None when it computes what it should, else why not."""
        version = entry.version
        await self._api.pause("abort" if self._on_update == "abort" else "keep")
        problem = None
        try:
            await self._api.update_weights(version.path, version.fingerprint, str(version.number))
            if self._on_update == "recompute":
                await self._api.forget_prefixes(recompute_running=True)
        except LoadFailed as error:
            problem = str(error)
        await self._api.resume()
        if problem is not None:
            return problem
        self.stamp, self.count = version.number, self.count + 1
        if self._canary is None:
            return None
        self.last_verdict = compare(await self._sing(self._canary.prompts), entry.logprobs, self._canary.tolerance)
        if self.last_verdict.ok:
            return None
        return f"the engine does not compute what its weights say: {self.last_verdict} (engine.canary_tolerance)"

    async def warm_up(self) -> None:
        """Have vLLM compute once. Some of its kernels are compiled in the first step, which is long for a commit that others wait for."""
        await self._sing([np.arange(1, 9, dtype=np.int32)] if self._canary is None else self._canary.prompts)

    async def _sing(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the engine says of the canary prompts, past every cache and every queue."""
        self._canaries += 1
        bodies = [calls.canary_body(f"canary-{self._canaries}-{i}", prompt_T) for i, prompt_T in enumerate(prompts)]
        answers = await asyncio.gather(*(self._api.score(body) for body in bodies))
        return [calls.prompt_logprobs(prompt_T, answer) for prompt_T, answer in zip(prompts, answers, strict=True)]
