"""One request inside the engine (`Sequence`), and the state of all running ones as columns (`SlotTable`).

A running sequence owns a slot: a row of the table. Everything that changes in every step (tokens, positions, lengths) lives in the columns,
so that a decode step touches no Python object per sequence; `Sequence` holds what changes at admission, at a weight swap and at the end.

    length    tokens known: the prompt and everything sampled
    context   tokens processed: those with KV and routing rows
    A sequence decodes when length - context == 1, and prefills (or recomputes) when more are missing.

Shape suffixes: R slots, T token positions, B blocks of a sequence, C stop ids, S sequences of a step, N positions of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slipstream.engine.sampler import SampleParams, mix_seed
from slipstream.types import GenerateRequest, Timings, Versions


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, where it is, and what survives preemption: tokens, logprobs and version stamps."""

    request: GenerateRequest
    seed: int
    limit: int
    """Most tokens in all: prompt + max_tokens, or the context length."""
    stop_ids: tuple[int, ...]
    arrived_s: float
    tokens_T: np.ndarray
    """All known tokens while it has no slot."""
    logprobs_N: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of the full blocks known so far."""
    stamps: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, completion index from which it sampled), when weights have changed since the first token."""
    asked: int = 0
    """Block sources that have been asked for its prefix since it last ran."""
    brought: dict[str, int] = field(default_factory=dict)
    """Tokens whose KV was fetched for it, by tier."""
    cached_tokens: int = 0
    admitted_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_T)

    def stamp(self, version: int, sampled: int) -> None:
        """From completion index `sampled` on, `version` samples. Called at first admission and at each commit."""
        if not self.stamps or self.stamps[-1][0] != version:
            self.stamps.append((version, sampled))

    def versions(self, sampled: int) -> Versions:
        """Run-length form over `sampled` tokens."""
        starts = [*(start for _, start in self.stamps), sampled]
        runs = zip(self.stamps, starts[1:], strict=True)
        return tuple((version, end - start) for (version, start), end in runs if end > start)

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """`cached_tokens` by where they came from. What was fetched for it and lost again before it ran is not among them."""
        device = self.cached_tokens - sum(self.brought.values())
        return {tier: tokens for tier, tokens in {"device": device, **self.brought}.items() if tokens > 0}

    def timings(self, now: float) -> Timings:
        admitted = self.admitted_s or now
        first = self.first_token_s or now
        return Timings(queued_s=admitted - self.arrived_s, prefill_s=first - admitted, decode_s=now - first)


@dataclass(frozen=True, slots=True)
class Rows:
    """Positions of sequences that are sampled from, sequence by sequence: `ahead` = 0, 1, ... behind the known tokens."""

    slot_N: np.ndarray
    ahead_N: np.ndarray
    position_N: np.ndarray


class SlotTable:
    """Columns over `num_slots` running sequences."""

    def __init__(self, num_slots: int, seq_len: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        blocks = -(-seq_len // block_tokens)
        self.tokens_RT = np.zeros((num_slots, seq_len), np.int32)
        self.logprobs_RT = np.zeros((num_slots, seq_len), np.float32)
        """Logprob of the token at the same position, where it was sampled."""
        self.blocks_RB = np.zeros((num_slots, blocks), np.int32)
        self.num_blocks_R = np.zeros(num_slots, np.int32)
        self.context_R = np.zeros(num_slots, np.int32)
        self.length_R = np.zeros(num_slots, np.int32)
        self.limit_R = np.zeros(num_slots, np.int32)
        self.stop_ids_RC = np.full((num_slots, 1), -1, np.int32)
        self.has_stop_text_R = np.zeros(num_slots, bool)
        self.temperature_R = np.zeros(num_slots, np.float32)
        self.top_p_R = np.ones(num_slots, np.float32)
        self.top_k_R = np.zeros(num_slots, np.int32)
        self.min_p_R = np.zeros(num_slots, np.float32)
        self.seed_R = np.zeros(num_slots, np.uint64)
        self.ids_R = np.full(num_slots, "", object)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence, blocks: list[int], context: int) -> None:
        """Give a sequence a slot, with KV for its first `context` tokens already in `blocks`."""
        slot = sequence.slot = self._free.pop()
        length, prompt = len(sequence.tokens_T), sequence.prompt_tokens
        self.tokens_RT[slot, :length] = sequence.tokens_T
        self.logprobs_RT[slot, prompt:length] = sequence.logprobs_N
        self.num_blocks_R[slot] = 0
        sequence.blocks = []
        self.append_blocks(sequence, blocks)
        self.context_R[slot], self.length_R[slot], self.limit_R[slot] = context, length, sequence.limit
        self.ids_R[slot] = sequence.id
        self._enter_sampling(slot, sequence)

    def _enter_sampling(self, slot: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.temperature_R[slot], self.top_p_R[slot] = sampling.temperature, sampling.top_p
        self.top_k_R[slot], self.min_p_R[slot] = min(sampling.top_k, 2**31 - 1), sampling.min_p
        self.seed_R[slot] = mix_seed(sequence.seed)
        self.has_stop_text_R[slot] = bool(sampling.stop)
        missing = len(sequence.stop_ids) - self.stop_ids_RC.shape[1]
        if missing > 0:
            self.stop_ids_RC = np.pad(self.stop_ids_RC, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids_RC[slot] = -1
        self.stop_ids_RC[slot, : len(sequence.stop_ids)] = sequence.stop_ids

    def append_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        start = len(sequence.blocks)
        sequence.blocks.extend(blocks)
        self.blocks_RB[sequence.slot, start : start + len(blocks)] = blocks
        self.num_blocks_R[sequence.slot] = start + len(blocks)

    def pop_blocks(self, sequence: Sequence, kept: int) -> list[int]:
        """Take its last blocks away, all but `kept`; the caller releases them."""
        blocks = sequence.blocks[kept:]
        del sequence.blocks[kept:]
        self.num_blocks_R[sequence.slot] = kept
        return blocks

    def leave(self, sequence: Sequence) -> list[int]:
        """Take the slot back; tokens and logprobs go to the sequence. Returns its blocks, which the caller releases."""
        slot = sequence.slot
        length = int(self.length_R[slot])
        sequence.tokens_T = self.tokens_RT[slot, :length].copy()
        sequence.logprobs_N = self.logprobs_RT[slot, sequence.prompt_tokens : length].copy()
        blocks, sequence.blocks, sequence.slot = sequence.blocks, [], -1
        self._free.append(slot)
        return blocks

    def sample_params(self, slots_S: np.ndarray, ahead_S: np.ndarray | int = 0) -> SampleParams:
        """Of sequences that sample now: the new token's position is their length, or as many tokens `ahead` of it."""
        return SampleParams(
            self.temperature_R[slots_S],
            self.top_p_R[slots_S],
            self.top_k_R[slots_S],
            self.min_p_R[slots_S],
            self.seed_R[slots_S],
            self.length_R[slots_S] + ahead_S,
        )

    def append_sampled(self, slots_S: np.ndarray, tokens_S: np.ndarray, logprobs_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Store one new token per slot. Returns (stopped by a stop id, out of room) per row."""
        position_S = self.length_R[slots_S]
        self.tokens_RT[slots_S, position_S] = tokens_S
        self.logprobs_RT[slots_S, position_S] = logprobs_S
        self.length_R[slots_S] = position_S + 1
        return self.is_stop(slots_S, tokens_S), position_S + 1 >= self.limit_R[slots_S]

    def rows_behind(self, slots_S: np.ndarray, counts_S: np.ndarray) -> Rows:
        """The next `counts` positions of each sequence: one that samples, and one for each guess behind it."""
        slot_N = np.repeat(slots_S, counts_S)
        ahead_N = np.arange(len(slot_N)) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)
        return Rows(slot_N, ahead_N, self.length_R[slot_N] + ahead_N)

    def advance(self, slots_S: np.ndarray, gained_S: np.ndarray) -> None:
        """So many tokens behind the known ones are known now, and all but the last are processed."""
        self.length_R[slots_S] += gained_S
        self.context_R[slots_S] = self.length_R[slots_S] - 1

    def kv_slots(self, slot_T: np.ndarray, position_T: np.ndarray) -> np.ndarray:
        """Where in the KV cache a token of a sequence lies: block * block_tokens + offset."""
        return self.blocks_RB[slot_T, position_T // self.block_tokens].astype(np.int64) * self.block_tokens + position_T % self.block_tokens

    def is_stop(self, slots_S: np.ndarray, tokens_S: np.ndarray) -> np.ndarray:
        return (self.stop_ids_RC[slots_S] == tokens_S[:, None]).any(axis=1)
