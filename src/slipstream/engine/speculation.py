"""Speculative decoding by prompt lookup: which tokens a decoding sequence processes on trial, and how many of them were right.

The target is sampled at every position with that position's own random number (`sampler`), as if there were no guesses; a guess is right
when it is the token that was sampled. So tokens and logprobs are those of decoding without guesses, not only their distribution: a
special case of rejection sampling (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023) for a
draft that puts all its weight on one token, with the draws in common.

Guesses stand in the slot table behind the known tokens, where nobody else looks. Knows nothing of models, blocks or KV.

Shape suffixes: R slots, S sequences of the step, F those with a match, M kinds of matches, N rows: positions that are sampled from,
sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.config.speculation import PromptLookup
from slipstream.engine.sequence import Rows, SlotTable
from slipstream.ops.lookup import LookupIndex

RATE = 0.15
"""Weight of the newest guess in a sequence's share of right ones: the last six or seven guesses decide."""
FIRST = (0.5, 0.9)
"""That share before anything is known, for short and for long matches."""
VERIFYING = 1.0
"""What a step costs more when it holds guesses at all, in tokens: to look at what became of them."""
LONG = 16
"""Tokens from which a match is long: a passage that is being copied, no phrase. Each kind has its own share of right guesses."""


@dataclass(slots=True)
class SpeculationCounts:
    """Since the start of the engine."""

    drafted: int = 0
    """Guesses processed."""
    accepted: int = 0
    """Guesses among them that were right and became part of a completion."""
    decodes: int = 0
    """Decoding sequences, summed over the steps. Each gives one token and those of its right guesses."""

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Of a decoding sequence."""
        return 1 + self.accepted / self.decodes if self.decodes else 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is kept of the rows of a step, and which sequences have met their end."""

    first_N: np.ndarray
    """Whether it is the first row of a sequence."""
    kept_N: np.ndarray
    gained_S: np.ndarray
    """Tokens gained, one or more: the right guesses and the token sampled behind them, but none behind a stop."""
    stopped_S: np.ndarray


def verify(tokens_N: np.ndarray, guesses_N: np.ndarray, stops_N: np.ndarray, ahead_N: np.ndarray) -> Verdict:
    """Rows of a sequence follow one another, `ahead` = 0, 1, ...: one for each guess, and a last one.

    `tokens`: sampled at each row; `guesses`: for the same position, meaningless in the last row; `stops`: whether the token ends the
    sequence.
    """
    first_N = ahead_N == 0
    starts_S, last_N = np.flatnonzero(first_N), np.append(first_N[1:], True)
    ends_N = last_N | (tokens_N != guesses_N) | stops_N  # what lies behind was sampled behind a wrong token, or is not wanted
    gained_S = np.minimum.reduceat(np.where(ends_N, ahead_N, len(ahead_N)), starts_S) + 1
    kept_N = ahead_N < np.repeat(gained_S, np.diff(starts_S, append=len(ahead_N)))
    return Verdict(first_N, kept_N, gained_S, stops_N[starts_S + gained_S - 1])


def append_verified(
    table: SlotTable,
    slots_S: np.ndarray,
    rows: Rows,
    tokens_N: np.ndarray,
    logprobs_N: np.ndarray,
    hits_stop_text: Callable[[int, int], bool],
) -> Verdict:
    """Store what is kept of the tokens sampled at `rows`. `hits_stop_text(slot, end)`: whether the token before position `end` completes a
    stop string."""
    guesses_N, stops_N = table.tokens_RT[rows.slot_N, rows.position_N], table.is_stop(rows.slot_N, tokens_N)
    table.tokens_RT[rows.slot_N, rows.position_N] = tokens_N  # those that are not kept lie behind what is known, as the guesses did
    table.logprobs_RT[rows.slot_N, rows.position_N] = logprobs_N
    verdict = verify(tokens_N, guesses_N, stops_N, rows.ahead_N)
    for i in np.flatnonzero(table.has_stop_text_R[rows.slot_N] & verdict.kept_N).tolist():
        stops_N[i] |= hits_stop_text(int(rows.slot_N[i]), int(rows.position_N[i]) + 1)
    if table.has_stop_text_R[slots_S].any():
        verdict = verify(tokens_N, guesses_N, stops_N, rows.ahead_N)
    table.advance(slots_S, verdict.gained_S)
    return verdict


class Drafter:
    """Guesses for the sequences of a slot table, as many as pay."""

    def __init__(self, table: SlotTable, config: PromptLookup) -> None:
        self._config = config
        self._table = table
        self._index = LookupIndex(table.tokens_RT, table.length_R, table.limit_R, config.min_match_tokens)
        self._right_RM = np.tile(FIRST, (len(table.length_R), 1))
        self._open: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        """(rows of the decoding sequences with a match, whether it is a long one, first guess) of the step under way."""

    def enter(self, slot: int) -> None:
        """A sequence has been given this slot."""
        self._index.clear(slot)
        self._right_RM[slot] = FIRST

    def draft(self, slots_S: np.ndarray, tokens: int, budget: int, drafts_S: np.ndarray) -> bool:
        """Say in `drafts`, which holds zeros, how many guesses to process beside the one known token of each decoding sequence; they
        stand behind it in the table. Returns whether there are any.

        `tokens`: in the step already; `budget`: how many more it may have.
        """
        table, most = self._table, self._config.max_draft_tokens
        self._open = None
        match_S = self._index.guess(slots_S, most)
        found = match_S.nonzero()[0]
        if not len(found):
            return False
        slots_F, long_F = slots_S[found], (match_S[found] >= LONG).astype(np.int64)
        length_F = table.length_R[slots_F]
        self._open = found, long_F, table.tokens_RT[slots_F, length_F]
        room_F = table.limit_R[slots_F] - length_F - 1  # all of them right, one more token is sampled
        wanted_F = self._worthwhile(np.clip(self._right_RM[slots_F, long_F], 0.01, 0.99), np.minimum(room_F, most), tokens)
        drafts_S[found] = np.clip(budget - (np.cumsum(wanted_F) - wanted_F), 0, wanted_F)
        return bool(drafts_S.any())

    def learn(self, slots_S: np.ndarray, first_S: np.ndarray, drafts_S: np.ndarray, right_S: np.ndarray) -> None:
        """Of the decoding sequences of the step: the next token, how many guesses were processed and how many of them were right.

        A guess that was not processed is compared as well, so that trying again needs no trial.
        """
        if self._open is None:
            return
        found, long_F, guess_F = self._open
        slots_F, tried_F = slots_S[found], np.maximum(drafts_S[found], 1)
        right_F = np.where(drafts_S[found] > 0, right_S[found], first_S[found] == guess_F)
        share_F = 1 - (1 - self._right_RM[slots_F, long_F]) * (1 - RATE) ** right_F
        self._right_RM[slots_F, long_F] = share_F * np.where(right_F < tried_F, 1 - RATE, 1.0)

    def _worthwhile(self, share_F: np.ndarray, most_F: np.ndarray, tokens: int) -> np.ndarray:
        """The i-th guess of a sequence is right with probability share^i. It pays above the share of a step's time that one more token
        takes of one that is there, n / (n + overhead); and all of them together must pay for `VERIFYING`."""
        price = tokens / (tokens + self._config.overhead_tokens)
        wanted_F = np.minimum((np.log(price) / np.log(share_F)).astype(np.int32), most_F)
        gain = (share_F * (1 - share_F**wanted_F) / (1 - share_F)).sum()
        return wanted_F if gain > price * (wanted_F.sum() + VERIFYING) else np.zeros_like(wanted_F)
