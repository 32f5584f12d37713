"""The embedded engine as three verbs: schedule a step, run the model on it, postprocess what was sampled.

Synchronous and single-threaded: the caller (a server's event loop, a test, a benchmark) calls `step` while `has_work`, and `add`, `abort`
and `commit` between steps. Only `prepare` may run in another thread meanwhile. Knows nothing of HTTP, chat or rewards.

Shape suffixes: S sequences of the step, N sampled tokens of a request, T token positions, L MoE layers, K experts, V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config.serve import EngineConfig
from slipstream.config.speculation import PromptLookup
from slipstream.engine.blocks import Blocks
from slipstream.engine.fetch import ENDINGS, BlockSource
from slipstream.engine.handoff.exports import Export, Exports
from slipstream.engine.kv import KvCache
from slipstream.engine.pace import Pace
from slipstream.engine.runner import Runner
from slipstream.engine.sampler import sample
from slipstream.engine.scheduler import ANY_VERSION, Plan, Scheduler
from slipstream.engine.sequence import Sequence, SlotTable
from slipstream.engine.speculation import Drafter, SpeculationCounts, append_verified
from slipstream.engine.stops import StopText
from slipstream.engine.tiers.hierarchy import Tiers
from slipstream.engine.weights import LiveWeights
from slipstream.errors import ConfigError, EngineUnavailable, RequestError
from slipstream.models.impl import Impl
from slipstream.types import Completion, EngineState, FinishReason, GenerateRequest, PolicyVersion, Routing

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
"""Beyond these, logits divided by the temperature leave float32. 0 is greedy."""


@dataclass(slots=True)
class StepResult:
    """What a step did: requests that ended, and the tokens that it sampled: one for each of some requests, or several one after the other
    where guesses were right."""

    finished: list[Completion] = field(default_factory=list)
    ids_S: np.ndarray = field(default_factory=lambda: np.zeros(0, object))
    """Request ids."""
    tokens_S: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs_S: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def tokens(self) -> list[tuple[str, list[int], list[float]]]:
        """(request id, new token ids, their logprobs), for streaming. Built when asked for: few steps need it."""
        tokens, logprobs = self.tokens_S.tolist(), self.logprobs_S.tolist()
        return [(name, [token], [logprob]) for name, token, logprob in zip(self.ids_S, tokens, logprobs, strict=True)]


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
        self._capture = config.capture_routing and bool(spec.moe_layers)
        fp8_kv = config.kv_dtype == "float8"
        self._cache = KvCache(spec, config.block_tokens, config.kv_memory_mib, dtype, self._capture, fp8_kv)
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
        self._fingerprints: dict[int, str] = {}
        """Of every version that was live."""
        self.tiers = Tiers(config.tiers, self.blocks) if config.tiers.enabled else None
        if self.tiers is not None and self._scheduler.prefix is not None:
            self.sources.append(self.tiers)
            self._scheduler.prefix.reclaimed = self.tiers.save
        self._bound_age(version)
        self._exports = Exports(self.blocks, self._table)
        wide_head = config.head_dtype == "float32"
        self._runner = Runner(self._table, self._cache, spec.head_dim, spec.num_experts, wide_head)
        self._random = np.random.default_rng(seed)
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[Completion] = []
        self._paused = False
        self._stuck = False
        """The last step found nothing to run: until a request comes or goes, only a fetch can change that."""
        self._started_s = time.perf_counter()
        self.tokens_generated = 0
        self.tokens_prefilled = 0
        self.speculation = SpeculationCounts()
        self.busy_s = 0.0
        """Seconds spent in `step`."""
        self.outcomes: Counter[FinishReason] = Counter()

    def _load_weights(self, dtype: torch.dtype, version: int, impl: Impl) -> LiveWeights:
        fp8 = None if self.config.dtype != "float8" else self.config.fp8_scales
        return LiveWeights(self.folder, dtype, version, impl, fp8)

    def yield_to_decoding(self, prompt_tokens: int) -> None:
        """From now on a step in which others decode computes this many prompt tokens, or more the longer some are left (`engine.pace`)."""
        self._scheduler.prompts = Pace(prompt_tokens)

    # ---- requests ----

    def add(self, request: GenerateRequest, export: Export | None = None) -> None:
        """Queue a request; its completion comes out of a later `step`. `export`: where KV blocks of it go as they are filled.

        Raises RequestError: it can never succeed. EngineUnavailable: too many are waiting.
        """
        if len(self._scheduler.waiting) >= self.config.max_waiting:
            raise EngineUnavailable(
                f"request {request.id}: {self.config.max_waiting} requests are waiting already (engine.max_waiting); try again later"
            )
        limit = self._checked_limit(request)
        sampling = request.sampling
        seed = int(self._random.integers(1 << 63)) if sampling.seed is None else sampling.seed
        stop_ids = tuple({*self._eos_ids, *sampling.stop_token_ids})
        tokens_T = np.asarray(request.prompt_T, np.int32)
        sequence = Sequence(request, seed, limit, stop_ids, time.perf_counter(), tokens_T)
        self._by_id[request.id] = sequence
        if export is not None:
            self._exports.add(export, sequence)
        self._scheduler.waiting.append(sequence)
        self._stuck = False

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
            logits_SV = self._runner.run(self._weights.model, plan, self._exports.begin(plan))
            self._exports.end()
            self._postprocess(plan, logits_SV, result)
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

    def _postprocess(self, plan: Plan, logits_SV: torch.Tensor, result: StepResult) -> None:
        """Sample, append, and end what has reached its end."""
        table = self._table
        table.context_R[plan.slots_S] += plan.counts_S - plan.drafts_S
        self.tokens_prefilled += plan.num_prefill
        slots_S = plan.slots_S[plan.samples_S]
        if not len(slots_S):
            return
        if plan.num_drafts:
            stopped_S, full_S = self._append_verified(plan, slots_S, logits_SV, result)
        else:
            stopped_S, full_S = self._append(plan, slots_S, logits_SV, result)
        self.tokens_generated += len(result.tokens_S)
        if plan.num_prefill:
            self._note_first_tokens(slots_S)
        ended = np.flatnonzero(stopped_S | full_S)
        if len(ended):
            self._end([(self._scheduler.at(int(slots_S[i])), "stop" if stopped_S[i] else "length") for i in ended], result.finished)

    def _append(self, plan: Plan, slots_S: np.ndarray, logits_SV: torch.Tensor, result: StepResult) -> tuple[np.ndarray, np.ndarray]:
        """One token for each. Returns (stopped, out of room)."""
        table = self._table
        tokens_S, logprobs_S = sample(logits_SV, table.sample_params(slots_S))
        stopped_S, full_S = table.append_sampled(slots_S, tokens_S, logprobs_S)
        result.ids_S, result.tokens_S, result.logprobs_S = table.ids_R[slots_S], tokens_S, logprobs_S
        for i in np.flatnonzero(table.has_stop_text_R[slots_S] & ~stopped_S):
            stopped_S[i] = self._slot_hits_stop_text(int(slots_S[i]), int(table.length_R[slots_S[i]]))
        self._learn(plan, tokens_S, plan.drafts_S)
        return stopped_S, full_S

    def _append_verified(
        self, plan: Plan, slots_S: np.ndarray, logits_NV: torch.Tensor, result: StepResult
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same where there are guesses. What was processed behind the last right one is taken back: blocks, and the experts' load."""
        table, drafts_S = self._table, plan.drafts_S[plan.samples_S]
        rows = table.rows_behind(slots_S, drafts_S + 1)
        tokens_N, logprobs_N = sample(logits_NV, table.sample_params(rows.slot_N, rows.ahead_N))
        verdict = append_verified(table, slots_S, rows, tokens_N, logprobs_N, self._slot_hits_stop_text)
        kept_N = verdict.kept_N
        self._runner.uncount(table.kv_slots(rows.slot_N[~kept_N], rows.position_N[~kept_N] - 1))
        self._scheduler.trim(slots_S[drafts_S > 0])
        result.ids_S, result.tokens_S, result.logprobs_S = table.ids_R[rows.slot_N[kept_N]], tokens_N[kept_N], logprobs_N[kept_N]
        self._learn(plan, tokens_N[verdict.first_N], verdict.gained_S - 1)
        return verdict.stopped_S, table.length_R[slots_S] >= table.limit_R[slots_S]

    def _learn(self, plan: Plan, first_S: np.ndarray, right_S: np.ndarray) -> None:
        """`first`: next token, `right`: guesses that were right, of the sequences that sampled: first the decoding ones."""
        counts, decoding = self.speculation, slice(plan.num_decode)
        counts.decodes += plan.num_decode
        counts.drafted += plan.num_drafts
        if plan.num_drafts:
            counts.accepted += int(right_S[decoding].sum())
        if self._drafter is not None:
            self._drafter.learn(plan.slots_S[decoding], first_S[decoding], plan.drafts_S[decoding], right_S[decoding])

    def _note_first_tokens(self, slots_S: np.ndarray) -> None:
        now = time.perf_counter()
        for slot in slots_S.tolist():
            sequence = self._scheduler.at(slot)
            if not sequence.first_token_s:
                sequence.first_token_s = now

    def _slot_hits_stop_text(self, slot: int, end: int) -> bool:
        """Whether the token before position `end` completes one of the stop strings of the sequence in this slot."""
        sequence = self._scheduler.at(slot)
        completion_N = self._table.tokens_RT[slot, sequence.prompt_tokens : end]
        return self._stop_text.hit(completion_N, sequence.request.sampling.stop)

    # ---- the end of a request ----

    def _end(self, ended: list[tuple[Sequence, FinishReason]], into: list[Completion]) -> None:
        """Free what these sequences hold and append their completions to `into`."""
        now = time.perf_counter()
        held = {id(sequence): self._read_blocks(sequence) for sequence, _ in ended}
        self._scheduler.leave([sequence for sequence, _ in ended if sequence.slot >= 0])
        for sequence, reason in ended:
            del self._by_id[sequence.id]
            if self._exports.drop(sequence.id):
                self.tokens_generated -= len(sequence.logprobs_N)  # a prefill for another engine: nobody's tokens
            else:
                self.outcomes[reason] += 1
            routing, kv_age = held[id(sequence)]
            tokens_N = sequence.tokens_T[sequence.prompt_tokens :]
            into.append(
                Completion(
                    id=sequence.id,
                    tokens_N=tokens_N,
                    logprobs_N=sequence.logprobs_N,
                    versions=sequence.versions(len(tokens_N)),
                    finish_reason=reason,
                    routing=routing,
                    cached_tokens=sequence.cached_tokens,
                    cached_by_tier=sequence.cached_by_tier,
                    kv_age=kv_age,
                    timings=sequence.timings(now),
                )
            )

    def _read_blocks(self, sequence: Sequence) -> tuple[Routing | None, int]:
        """Routing rows from `routing_from` on, and the age of the oldest KV block, of a sequence that is about to go."""
        running = sequence.slot >= 0
        length = int(self._table.length_R[sequence.slot]) if running else len(sequence.tokens_T)
        context = int(self._table.context_R[sequence.slot]) if running else 0
        used = np.array(sequence.blocks[: self._scheduler.blocks_for(context)], np.int64)
        kv_age = self._weights.number - int(self._cache.versions_N[used].min()) if len(used) else 0
        if not self._capture:
            return None, kv_age
        start = sequence.request.routing_from
        position_T = np.arange(start, max(start, length - 1))
        valid_T = position_T < context
        ids_TLK = np.zeros((len(position_T), *self._cache.routing.shape[1:]), self._cache.routing.dtype)
        known = int(valid_T.sum())
        ids_TLK[:known] = self._cache.rows(used, start, start + known)
        return Routing(start, ids_TLK, valid_T), kv_age

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
        self._bound_age(number)
        for sequence in self._scheduler.running:
            sequence.stamp(number, int(self._table.length_R[sequence.slot]) - sequence.prompt_tokens)

    def _bound_age(self, number: int) -> None:
        """Use no KV that is too old for version `number`, which is live now; on the device, in the tiers, or of a running sequence."""
        fingerprint, known = self._weights.fingerprint, self._fingerprints.get(number)
        if known not in (None, fingerprint):  # rolled back, and another policy has taken the number
            self._scheduler.expire(range(-1, number))
        self._fingerprints[number] = fingerprint
        oldest = 0 if self.config.on_update == "recompute" else self.config.max_kv_age
        if oldest is not None:
            self._scheduler.expire(range(number - oldest, number + 1))
        elif known not in (None, fingerprint):
            self._scheduler.expire(ANY_VERSION)
        if self.tiers is not None:
            self.tiers.versions = self._scheduler.versions
            if fingerprint:
                self.tiers.weights[number] = bytes.fromhex(fingerprint)

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

    # ---- checks ----

    def _checked_limit(self, request: GenerateRequest) -> int:
        """Most tokens in all, or RequestError."""
        prompt_T, sampling = request.prompt_T, request.sampling
        if request.id in self._by_id:
            raise RequestError(f"request {request.id}: a request with this id is running; ids must be unique among live requests")
        if len(prompt_T) == 0:
            raise RequestError(f"request {request.id}: the prompt is empty; it needs at least one token")
        if len(prompt_T) + 1 > self.seq_len:
            raise RequestError(
                f"request {request.id}: a prompt of {len(prompt_T)} tokens leaves no room in a context of {self.seq_len}; shorten it"
            )
        lowest, highest = int(prompt_T.min()), int(prompt_T.max())
        if lowest < 0 or highest >= self.spec.vocab_size:
            raise RequestError(
                f"request {request.id}: token id {lowest if lowest < 0 else highest} is not in the vocabulary of {self.spec.vocab_size}"
            )
        _check_sampling(request, self.spec.vocab_size)
        limit = min(len(prompt_T) + sampling.max_tokens, self.seq_len)
        blocks = self._scheduler.blocks_for(limit - 1)
        if blocks > self._cache.num_blocks:
            raise RequestError(
                f"request {request.id}: prompt + max_tokens = {limit} tokens need {blocks} KV blocks, "
                f"but there are {self._cache.num_blocks}: lower max_tokens or raise engine.kv_memory_mib"
            )
        if sampling.stop:
            self._stop_text  # noqa: B018  a missing tokenizer is the request's problem, not the step's
        return limit

    @cached_property
    def _eos_ids(self) -> frozenset[int]:
        has_tokenizer = (self.folder / "tokenizer.json").exists()
        return frozenset(self.spec.eos_ids) | (self._tokenizer.eos_ids if has_tokenizer else frozenset())

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.folder, need_template=False)

    @cached_property
    def _stop_text(self) -> StopText:
        return StopText(self._tokenizer)


def _check_sampling(request: GenerateRequest, vocab_size: int) -> None:
    """Raises RequestError for values that no distribution has, or that the engine's float32 and int32 columns cannot hold.

    One request must not be able to fail a step: the step is everybody's.
    """
    s = request.sampling
    wrong = {
        "temperature": not (s.temperature == 0 or MIN_TEMPERATURE <= s.temperature <= MAX_TEMPERATURE),
        "top_p": not 0 < s.top_p <= 1,
        "top_k": s.top_k < 0,
        "min_p": not 0 <= s.min_p <= 1,
        "max_tokens": s.max_tokens < 1,
        "stop": any(not text for text in s.stop),
        "stop_token_ids": any(not 0 <= i < vocab_size for i in s.stop_token_ids),
        "routing_from": not 0 <= request.routing_from < 1 << 31,
        "salt": not 0 <= request.salt < 1 << 63,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            value = getattr(s if hasattr(s, name) else request, name)
            raise RequestError(f"request {request.id}: {name} = {value!r} is out of range")
