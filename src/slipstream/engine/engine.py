"""The embedded engine: requests, and the step loop as three verbs: schedule, run the model, postprocess.

Synchronous and single-threaded: the caller (a server's event loop, a test, a benchmark) calls `step` while `has_work`, and `add`, `abort`
and `commit` between steps. Only `prepare` may run in another thread meanwhile. Knows nothing of HTTP, chat or rewards.

Shape suffixes: S sequences of the step, N rows of logits, V vocabulary, T token positions, L MoE layers, E experts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from pathlib import Path

import numpy as np
import torch

from slipstream.config.serve import EngineConfig
from slipstream.config.speculation import PromptLookup
from slipstream.engine.blocks import Blocks
from slipstream.engine.completion import complete, read_blocks
from slipstream.engine.fetch import ENDINGS, BlockSource
from slipstream.engine.handoff.exports import Export, Exports
from slipstream.engine.kv import KvCache
from slipstream.engine.postprocess import Postprocess, StepResult
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Sequence, SlotTable
from slipstream.engine.speculation import Drafter
from slipstream.engine.stops import Stops
from slipstream.engine.tiers.hierarchy import Tiers
from slipstream.engine.versions import UsableVersions
from slipstream.engine.weights import LiveWeights
from slipstream.errors import ConfigError, EngineUnavailable, RequestError
from slipstream.models.impl import Impl
from slipstream.serving.checks import check_request
from slipstream.types import Completion, EngineState, FinishReason, GenerateRequest, PolicyVersion

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}


class EmbeddedEngine:
    """One model, one KV pool, one step loop."""

    def __init__(
        self, folder: str | Path, config: EngineConfig, seq_len: int, seed: int = 0, version: int = 0, impl: Impl = "auto"
    ) -> None:
        """Load the HF model in `folder` as policy version `version` (-1: nothing is live until the first commit).

        `seq_len` is the context in tokens. `seed` draws the seeds of requests that bring none. `impl`: see `models.impl`.
        Sets torch's threads to config.threads.
        Raises ModelError or ConfigError.
        """
        torch.set_num_threads(config.threads)
        self.folder, self.config, self.seq_len = Path(folder), config, seq_len
        dtype = _DTYPES[config.dtype]
        self._weights = self._load_weights(dtype, version, impl)
        spec = self.spec = self._weights.model.spec
        if seq_len < 2:
            raise ConfigError(f"model.seq_len = {seq_len}: a context holds at least one token of prompt and one sampled; use 2 or more")
        if seq_len > spec.max_positions:
            raise ConfigError(
                f"model.seq_len = {seq_len} is more than the {spec.max_positions} positions of the model in {folder}: lower model.seq_len"
            )
        fp8_kv = config.kv_dtype == "float8"
        self._cache = KvCache(spec, config.block_tokens, config.kv_memory_mib, dtype, config.capture_routing, fp8_kv)
        self._table = SlotTable(config.max_running, seq_len, config.block_tokens)
        speculation = config.speculation
        self._drafter = Drafter(self._table, speculation) if isinstance(speculation, PromptLookup) else None
        self.blocks = Blocks(self._cache, spec, f"{config.dtype} {config.fp8_scales} {impl}")
        self.sources: list[BlockSource] = []
        """Where blocks may come from beside the device, in the order in which they are asked."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called from any thread when `has_work` may have become true by itself."""
        self._arrived = threading.Event()
        self._scheduler = Scheduler(
            self._table, self._cache, config.max_step_tokens, config.prefix_cache, self._drafter, self.sources, self._wake
        )
        self.tiers = Tiers(config.tiers, self.blocks) if config.tiers.enabled else None
        if self.tiers is not None and self._scheduler.prefix is not None:
            self.sources.append(self.tiers)
            self._scheduler.prefix.reclaimed = self.tiers.save
        max_age = 0 if config.on_update == "recompute" else config.max_kv_age
        self._usable = UsableVersions(self._scheduler, self.tiers, max_age)
        self._usable.set_live(version, self._weights.fingerprint)
        self._exports = Exports(self.blocks, self._table)
        self._stops = Stops(self.folder, spec.eos_ids)
        wide_head = config.head_dtype == "float32"
        self._runner = Runner(self._table, self._cache, spec.head_dim, spec.num_experts, wide_head)
        self._postprocess = Postprocess(self._scheduler, self._runner, self._drafter, self._stops)
        self._random = np.random.default_rng(seed)
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[Completion] = []
        self._paused = False
        self._stuck = False
        """The last step found nothing to run: until a request comes or goes, only a fetch can change that."""
        self._started_s = time.perf_counter()
        self.tokens_generated = 0
        self.tokens_prefilled = 0
        self.speculation = self._postprocess.counts
        self.busy_s = 0.0
        """Seconds spent in `step`."""
        self.outcomes: Counter[FinishReason] = Counter()

    def _load_weights(self, dtype: torch.dtype, version: int, impl: Impl) -> LiveWeights:
        fp8 = None if self.config.dtype != "float8" else self.config.fp8_scales
        return LiveWeights(self.folder, dtype, version, impl, fp8)

    # ---- requests ----

    def add(self, request: GenerateRequest, export: Export | None = None) -> None:
        """Queue a request; its completion comes out of a later `step`. `export`: where KV blocks of it go as they are filled.

        Raises RequestError: it can never succeed. EngineUnavailable: too many are waiting.
        """
        if len(self._scheduler.waiting) >= self.config.max_waiting:
            raise EngineUnavailable(
                f"request {request.id}: {self.config.max_waiting} requests are waiting already (engine.max_waiting); try again later"
            )
        if request.id in self._by_id:
            raise RequestError(f"request {request.id}: a request with this id is running; ids must be unique among live requests")
        check_request(request, self.seq_len, self.spec.vocab_size)
        sampling, limit = request.sampling, self._token_limit(request)
        if sampling.stop:
            self._stops.text  # noqa: B018  a missing tokenizer is the request's problem, not the step's
        seed = int(self._random.integers(1 << 63)) if sampling.seed is None else sampling.seed
        stop_ids = tuple({*self._stops.ids, *sampling.stop_token_ids})
        tokens_T = np.asarray(request.prompt_T, np.int32)
        sequence = Sequence(request, seed, limit, stop_ids, time.perf_counter(), tokens_T)
        self._by_id[request.id] = sequence
        if export is not None:
            self._exports.add(export, sequence)
        self._scheduler.waiting.append(sequence)
        self._stuck = False

    def _token_limit(self, request: GenerateRequest) -> int:
        """Most tokens of prompt and completion. Raises RequestError when their KV has no room even alone."""
        limit = min(len(request.prompt_T) + request.sampling.max_tokens, self.seq_len)
        blocks = self._scheduler.blocks_for(limit - 1)
        if blocks > self._cache.num_blocks:
            raise RequestError(
                f"request {request.id}: prompt + max_tokens = {limit} tokens need {blocks} KV blocks, "
                f"but there are {self._cache.num_blocks}: lower max_tokens or raise engine.kv_memory_mib"
            )
        return limit

    def abort(self, request_ids: Ordered[str]) -> None:
        """End these requests with finish reason `abort` and free what they hold; unknown ids are ignored.

        Their completions, with what was sampled so far, come out of the next `step`.
        """
        self._stuck = False
        sequences = [self._by_id[name] for name in dict.fromkeys(request_ids) if name in self._by_id]
        self._scheduler.withdraw([sequence for sequence in sequences if sequence.slot < 0])
        self._end([(sequence, "abort") for sequence in sequences], self._ended)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        scheduler, fetches = self._scheduler, self._scheduler.fetches
        if self._ended or self._paused:
            return bool(self._ended)
        if self._stuck and fetches:
            return fetches.ready(time.perf_counter())
        return bool(scheduler.running or scheduler.waiting or (fetches and fetches.ready(time.perf_counter())))

    @property
    def idle_s(self) -> float | None:
        """While there is no work: seconds until there may be some though nobody called; None: for ever."""
        deadline = self._scheduler.fetches.deadline() if self._scheduler.fetches and not self._paused else None
        return None if deadline is None else max(0.0, deadline - time.perf_counter())

    def wait(self) -> bool:
        """For callers without an event loop: block until `step` would do something; False when nothing is left to do."""
        while not self.has_work:
            if (patience_s := self.idle_s) is None:
                return False
            self._arrived.wait(patience_s)
            self._arrived.clear()
        return True

    def _wake(self) -> None:
        """Called by threads of block sources."""
        self._arrived.set()
        self.on_ready()

    # ---- the step ----

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Schedule, run, postprocess. Returns at once when there is nothing to do or the engine is paused.

        After an error: `recover`.
        """
        began = time.perf_counter()
        result = StepResult(finished=self._ended)
        plan = None if self._paused else self._scheduler.plan(self._weights.number, began)
        self._stuck = plan is None and not self._paused
        if plan is not None:
            logits_NV = self._runner.run(self._weights.model, plan, self._exports.begin(plan))
            self._exports.end()
            self.tokens_prefilled += plan.num_prefill
            ended = self._postprocess(plan, logits_NV, result)
            self.tokens_generated += len(result.tokens_S)
            if ended:
                self._end(ended, result.finished)
        self._ended = []  # not before: what has ended is handed out by the next step when this one fails
        self.busy_s += time.perf_counter() - began
        return result

    def recover(self) -> list[str]:
        """After a step that raised: forget every running request, and all KV that a later one could find; returns their ids.

        What waits goes on, and completions that were not handed out come with the next step. Raises when the books do not balance.
        """
        lost = self._scheduler.running
        self._scheduler.leave(lost)
        self._scheduler.stop_fetching()
        if self._scheduler.prefix is not None:
            self._scheduler.prefix.clear()
        for sequence in lost:
            del self._by_id[sequence.id]
            self._exports.drop(sequence.id)
        self.check_integrity()
        return [sequence.id for sequence in lost]

    def _end(self, ended: list[tuple[Sequence, FinishReason]], into: list[Completion]) -> None:
        """Free what these sequences hold and append their completions to `into`."""
        now = time.perf_counter()
        held = [read_blocks(sequence, self._table, self._cache, self._weights.number) for sequence, _ in ended]
        self._scheduler.leave([sequence for sequence, _ in ended if sequence.slot >= 0])
        for (sequence, reason), (routing, kv_age) in zip(ended, held, strict=True):
            del self._by_id[sequence.id]
            if self._exports.drop(sequence.id):
                self.tokens_generated -= len(sequence.logprobs_N)  # a prefill for another engine: nobody's tokens
            else:
                self.outcomes[reason] += 1
            into.append(complete(sequence, reason, routing, kv_age, now))

    # ---- weights ----

    def prepare(self, version: PolicyVersion) -> None:
        """Load and verify new weights beside the live ones; may run in another thread. Idempotent.

        Raises EngineError when they cannot be read, do not fit, or do not have the version's fingerprint.
        """
        self._weights.prepare(version)

    def commit(self, number: int) -> None:
        """Swap the prepared weights in. Between steps; idempotent for the live version. Raises EngineError when it is not prepared.

        Sequences with sampled tokens go on (`keep`), are recomputed under the new weights, or are aborted: `config.on_update`.
        """
        if not self._weights.commit(number):
            return
        self._stuck = False
        if self.config.on_update == "abort":
            begun = [s.id for s in self._by_id.values() if s.slot >= 0 or len(s.logprobs_N)]
            self.abort(begun)
        self._usable.set_live(number, self._weights.fingerprint)
        for sequence in self._scheduler.running:
            sequence.stamp(number, int(self._table.length_R[sequence.slot]) - sequence.prompt_tokens)

    # ---- control and what it says about itself ----

    def pause(self) -> None:
        """Take no steps; requests are still accepted."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def close(self) -> None:
        """End the threads of the tiers; what they hold on disk stays. The engine takes no steps afterwards."""
        if self.tiers is not None:
            self.tiers.close()

    def state(self) -> EngineState:
        prepared = self._weights.prepared
        pool = self._scheduler.pool
        return EngineState(
            live_version=self._weights.number,
            fingerprint=self._weights.fingerprint,
            prepared_version=None if prepared is None else prepared.number,
            running=len(self._scheduler.running),
            waiting=len(self._by_id) - len(self._scheduler.running),
            kv_used_frac=pool.used / pool.num_blocks,
            paused=self._paused,
            generated_tokens=self.tokens_generated,
            busy_s=self.busy_s,
            uptime_s=time.perf_counter() - self._started_s,
            kv_tokens=pool.num_blocks * self.config.block_tokens if self.config.prefix_cache else 0,
            block_tokens=self.config.block_tokens,
        )

    @property
    def tokens_cached(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self._scheduler.tokens_cached

    def block_values(self) -> dict[str, float]:
        """Metrics of where KV came from and where it went."""
        scheduler = self._scheduler
        values = {f"engine/tiers/{name}/hit_tokens": float(scheduler.hit_tokens[name]) for name in ("device", "peer")}
        if scheduler.fetches is not None:
            values["engine/time/fetch_s"] = scheduler.fetches.seconds
            values |= {f"engine/fetches/{how}": float(scheduler.fetches.ended[how]) for how in ENDINGS}
        return values | (self.tiers.values() if self.tiers is not None else {})

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def expert_load(self) -> np.ndarray:
        """[L, E]: tokens that each expert of each MoE layer has processed."""
        return self._runner.expert_load_LE

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights: those that are live, prepared and spare."""
        return self._weights.resident_bytes

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV pool, used or not."""
        return self._cache.nbytes

    @property
    def kv_age_max(self) -> int:
        """Policy versions between the live one and the oldest KV block in use now."""
        blocks = [block for sequence in self._scheduler.running for block in sequence.blocks]
        return self._weights.number - int(self._cache.versions_N[blocks].min()) if blocks else 0

    def check_integrity(self) -> None:
        """Raises StateError unless every KV block is accounted for."""
        self._scheduler.check_integrity()
