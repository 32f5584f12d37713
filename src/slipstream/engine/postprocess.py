"""What becomes of the logits of a step: tokens are sampled and stored, guesses are verified, and sequences reach their end.

Shape suffixes: S sequences of the step that sample, N rows of logits (one for each of them and one for each guess), V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.engine.runner import Runner
from slipstream.engine.sampler import sample
from slipstream.engine.scheduler import Plan, Scheduler
from slipstream.engine.sequence import Sequence
from slipstream.engine.speculation import Drafter, SpeculationCounts, append_verified
from slipstream.engine.stops import Stops
from slipstream.types import Completion, FinishReason


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


class Postprocess:
    """Of one engine."""

    def __init__(self, scheduler: Scheduler, runner: Runner, drafter: Drafter | None, stops: Stops) -> None:
        self.counts = SpeculationCounts()
        self._table = scheduler.table
        self._scheduler, self._runner, self._drafter, self._stops = scheduler, runner, drafter, stops

    def __call__(self, plan: Plan, logits_NV: torch.Tensor, result: StepResult) -> list[tuple[Sequence, FinishReason]]:
        """Sample and append; the tokens go into `result`. Returns the sequences that have reached their end."""
        self._table.context_R[plan.slots_S] += plan.counts_S - plan.drafts_S
        slots_S = plan.slots_S[plan.samples_S]
        if not len(slots_S):
            return []
        append = self._append_verified if plan.num_drafts else self._append
        stopped_S, full_S = append(plan, slots_S, logits_NV, result)
        if plan.num_prefill:
            self._note_first_tokens(slots_S)
        ended = np.flatnonzero(stopped_S | full_S)
        return [(self._scheduler.at(int(slots_S[i])), "stop" if stopped_S[i] else "length") for i in ended]

    def _append(self, plan: Plan, slots_S: np.ndarray, logits_SV: torch.Tensor, result: StepResult) -> tuple[np.ndarray, np.ndarray]:
        """One token for each. Returns (stopped, out of room)."""
        table = self._table
        tokens_S, logprobs_S = sample(logits_SV, table.sample_params(slots_S))
        stopped_S, full_S = table.append_sampled(slots_S, tokens_S, logprobs_S)
        result.ids_S, result.tokens_S, result.logprobs_S = table.ids_R[slots_S], tokens_S, logprobs_S
        for i in np.flatnonzero(table.has_stop_text_R[slots_S] & ~stopped_S):
            stopped_S[i] = self._hits_stop_text(int(slots_S[i]), int(table.length_R[slots_S[i]]))
        self._learn(plan, tokens_S, plan.drafts_S)
        return stopped_S, full_S

    def _append_verified(
        self, plan: Plan, slots_S: np.ndarray, logits_NV: torch.Tensor, result: StepResult
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same where there are guesses. What was processed behind the last right one is taken back: blocks, and the experts' load."""
        table, drafts_S = self._table, plan.drafts_S[plan.samples_S]
        rows = table.rows_behind(slots_S, drafts_S + 1)
        tokens_N, logprobs_N = sample(logits_NV, table.sample_params(rows.slot_N, rows.ahead_N))
        verdict = append_verified(table, slots_S, rows, tokens_N, logprobs_N, self._hits_stop_text)
        kept_N = verdict.kept_N
        self._runner.uncount(table.kv_slots(rows.slot_N[~kept_N], rows.position_N[~kept_N] - 1))
        self._scheduler.trim(slots_S[drafts_S > 0])
        result.ids_S, result.tokens_S, result.logprobs_S = table.ids_R[rows.slot_N[kept_N]], tokens_N[kept_N], logprobs_N[kept_N]
        self._learn(plan, tokens_N[verdict.first_N], verdict.gained_S - 1)
        return verdict.stopped_S, table.length_R[slots_S] >= table.limit_R[slots_S]

    def _learn(self, plan: Plan, first_S: np.ndarray, right_S: np.ndarray) -> None:
        """`first`: next token, `right`: guesses that were right, of the sequences that sampled: first the decoding ones."""
        counts, decoding = self.counts, slice(plan.num_decode)
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

    def _hits_stop_text(self, slot: int, end: int) -> bool:
        """Whether the token before position `end` completes one of the stop strings of the sequence in this slot."""
        sequence = self._scheduler.at(slot)
        completion_N = self._table.tokens_RT[slot, sequence.prompt_tokens : end]
        return self._stops.text.hit(completion_N, sequence.request.sampling.stop)
