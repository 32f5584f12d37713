"""An engine that says what it is told to say, one token a step, with the embedded engine's interface and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.engine.speculation import SpeculationCounts
from slipstream.errors import EngineError, EngineUnavailable, RequestError
from slipstream.types import Completion, EngineState, FinishReason, GenerateRequest, PolicyVersion


@dataclass
class Step:
    finished: list[Completion] = field(default_factory=list)
    tokens: list[tuple[str, list[int], list[float]]] = field(default_factory=list)


@dataclass
class Running:
    request: GenerateRequest
    script: list[int]
    said: int = 0


class ScriptedEngine:
    """`script(request)` gives the token ids of each reply; the reply ends as 'stop' unless max_tokens cuts it."""

    def __init__(self, script: Callable[[GenerateRequest], Sequence[int]], version: int = 0, seq_len: int = 256, max_waiting: int = 1000):
        self.script = script
        self.seq_len = seq_len
        self.max_waiting = max_waiting
        self.running: dict[str, Running] = {}
        self.ended: list[Completion] = []
        self.added: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.prepared: PolicyVersion | None = None
        self.live = PolicyVersion(version, f"fingerprint-{version}", None, "")
        self.paused = False
        self.steps = 0
        self.failures: list[Exception] = []
        """What the next steps raise."""
        self.on_ready: Callable[[], None] = lambda: None
        self.idle_s: float | None = None
        self.tokens_prefilled = self.tokens_cached = self.preemptions = self.kv_age_max = 0
        self.speculation = SpeculationCounts()
        self.weight_bytes = self.kv_bytes = 0
        self.expert_load = np.zeros((2, 4), np.int64)

    @property
    def has_work(self) -> bool:
        return bool(self.ended or (self.running and not self.paused))

    def add(self, request: GenerateRequest, export: object = None) -> None:
        if len(self.running) >= self.max_waiting:
            raise EngineUnavailable(f"request {request.id}: {self.max_waiting} requests are waiting already")
        if len(request.prompt_T) >= self.seq_len:
            raise RequestError(f"request {request.id}: a prompt of {len(request.prompt_T)} tokens leaves no room")
        self.added.append(request)
        self.running[request.id] = Running(request, list(self.script(request)))

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if name in self.running:
                self.aborted.append(name)
                self.ended.append(self._completion(self.running.pop(name), "abort"))

    def step(self) -> Step:
        if self.failures:
            raise self.failures.pop(0)
        self.steps += 1
        result, self.ended = Step(self.ended), []
        for name, running in list(self.running.items()):
            if self.paused:
                break
            if running.said < len(running.script):
                result.tokens.append((name, [running.script[running.said]], [-0.5]))
                running.said += 1
            full = running.said >= running.request.sampling.max_tokens
            if full or running.said >= len(running.script):
                del self.running[name]
                result.finished.append(self._completion(running, "stop" if running.said >= len(running.script) else "length"))
        return result

    def recover(self) -> list[str]:
        lost, self.running = list(self.running), {}
        return lost

    def prepare(self, version: PolicyVersion) -> None:
        if version.fingerprint == "wrong":
            raise EngineError(f"version {version.number}: the weights do not have the fingerprint {version.fingerprint}")
        self.prepared = version

    def commit(self, number: int) -> None:
        if number == self.live.number:
            return
        if self.prepared is None or self.prepared.number != number:
            raise EngineError(f"commit({number}): not prepared")
        self.live, self.prepared = self.prepared, None

    def block_values(self) -> dict[str, float]:
        return {"engine/tiers/ram/hit_tokens": 3.0, "engine/tiers/ram/used_mib": 2.0}

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def state(self) -> EngineState:
        base = EngineState(self.live.number, self.live.fingerprint, None if self.prepared is None else self.prepared.number)
        return replace(base, running=len(self.running), paused=self.paused, generated_tokens=sum(r.said for r in self.running.values()))

    def _completion(self, running: Running, reason: FinishReason) -> Completion:
        tokens_N = np.array(running.script[: running.said], np.int32)
        versions = ((self.live.number, len(tokens_N)),) if len(tokens_N) else ()
        return Completion(running.request.id, tokens_N, np.full(len(tokens_N), -0.5, np.float32), versions, reason, cached_tokens=1)
