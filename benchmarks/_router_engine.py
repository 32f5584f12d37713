"""The embedded engine without its arithmetic: its real scheduler, block pool and prefix cache, and a model whose steps only take time.

`pause` makes the time pass: `time.sleep` in a server process, nothing in a simulation, which reads `step_s` and moves its own clock. Has
the interface that `EngineDriver` drives, so that the real server stands in front of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from benchmarks._router_trace import VOCAB
from slipstream.engine.scheduler import Plan, Scheduler
from slipstream.engine.sequence import Sequence as Running
from slipstream.engine.sequence import SlotTable
from slipstream.errors import RequestError
from slipstream.types import Completion, EngineState, FinishReason, GenerateRequest, PolicyVersion


@dataclass(frozen=True)
class Costs:
    """Of one replica."""

    step_s: float = 0.02
    """Of a step, whatever is in it."""
    prefill_token_s: float = 1 / 16000
    decode_token_s: float = 0.0003
    kv_tokens: int = 64 * 1024
    block_tokens: int = 64
    max_running: int = 32
    max_step_tokens: int = 2048
    seq_len: int = 16384


class ModelledEngine:
    """See `slipstream.engine.driver.SteppedEngine`."""

    def __init__(self, costs: Costs, pause: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.perf_counter):
        self.costs, self._pause, self._clock = costs, pause, clock
        self.seq_len = costs.seq_len
        blocks = costs.kv_tokens // costs.block_tokens
        self._table = SlotTable(costs.max_running, costs.seq_len, costs.block_tokens)
        cache = SimpleNamespace(num_blocks=blocks, nbytes=blocks, block_tokens=costs.block_tokens, versions_N=np.zeros(blocks, np.int32))
        self._scheduler = Scheduler(self._table, cache, costs.max_step_tokens, prefix_cache=True)  # pyright: ignore[reportArgumentType]
        self._ended: list[Completion] = []
        self._by_id: dict[str, Running] = {}
        self._started_s = clock()
        self.busy_s = self.step_s = 0.0
        self.tokens_prefilled = self.preemptions = self.kv_age_max = self.generated = 0
        self.expert_load = np.zeros((1, 1), np.int64)

    @property
    def has_work(self) -> bool:
        return bool(self._ended or self._scheduler.running or self._scheduler.waiting)

    @property
    def tokens_cached(self) -> int:
        return self._scheduler.tokens_cached

    idle_s = None

    def add(self, request: GenerateRequest, export: None = None) -> None:
        limit = len(request.prompt_T) + request.sampling.max_tokens
        if limit > self.seq_len:
            raise RequestError(f"request {request.id}: {limit} tokens do not fit {self.seq_len}")
        sequence = self._by_id[request.id] = Running(request, 0, limit, (), self._clock(), request.prompt_T)
        self._scheduler.waiting.append(sequence)

    def step(self) -> SimpleNamespace:
        ended, self._ended = self._ended, []
        plan = self._scheduler.plan(0, self._clock())
        self.step_s = 0.0
        if plan is not None:
            prefill = plan.num_tokens - plan.num_decode
            self.step_s = self.costs.step_s + prefill * self.costs.prefill_token_s + plan.num_decode * self.costs.decode_token_s
            self.tokens_prefilled += prefill
            self.busy_s += self.step_s
            self._pause(self.step_s)
            ended += self._sample(plan)
        return SimpleNamespace(finished=ended, tokens=())

    def _sample(self, plan: Plan) -> list[Completion]:
        table, now = self._table, self._clock() + (0.0 if self._pause is time.sleep else self.step_s)
        table.context_R[plan.slots_S] += plan.counts_S
        slots_S = plan.slots_S[plan.samples_S]
        tokens_S = (table.length_R[slots_S] * 31 % (VOCAB - 1) + 1).astype(np.int32)
        _, full_S = table.append_sampled(slots_S, tokens_S, np.zeros(len(slots_S), np.float32))
        self.generated += len(slots_S)
        for slot in slots_S[plan.counts_S[plan.samples_S] > 1].tolist() if plan.num_tokens != plan.num_decode else ():
            sequence = self._scheduler.at(slot)
            sequence.first_token_s = sequence.first_token_s or now
        return self._end([self._scheduler.at(slot) for slot in slots_S[full_S].tolist()], "length", now)

    def _end(self, sequences: list[Running], reason: FinishReason, now: float) -> list[Completion]:
        self._scheduler.leave([sequence for sequence in sequences if sequence.slot >= 0])
        completions = []
        for sequence in sequences:
            del self._by_id[sequence.id]
            sampled_N = sequence.tokens_T[sequence.prompt_tokens :].copy()
            versions = ((0, len(sampled_N)),) if len(sampled_N) else ()
            completions.append(
                Completion(
                    sequence.id,
                    sampled_N,
                    np.zeros(len(sampled_N), np.float32),
                    versions,
                    reason,
                    cached_tokens=sequence.cached_tokens,
                    timings=sequence.timings(now),
                )
            )
        return completions

    def abort(self, request_ids: Sequence[str]) -> None:
        gone = [self._by_id[name] for name in request_ids if name in self._by_id]
        for sequence in gone:
            if sequence.slot < 0:
                self._scheduler.waiting.remove(sequence)
        self._ended += self._end(gone, "abort", self._clock())

    def recover(self) -> Sequence[str]:
        raise RuntimeError("a step of the modelled engine failed")

    def prepare(self, version: PolicyVersion) -> None: ...

    def commit(self, number: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def state(self) -> EngineState:
        pool = self._scheduler.pool
        return EngineState(
            live_version=0,
            fingerprint="modelled",
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_used_frac=pool.used / pool.num_blocks,
            generated_tokens=self.generated,
            busy_s=self.busy_s,
            uptime_s=self._clock() - self._started_s,
            kv_tokens=pool.num_blocks * self.costs.block_tokens,
            block_tokens=self.costs.block_tokens,
        )
