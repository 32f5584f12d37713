"""What runs in the next step: continuous batching with chunked prefill over a bounded pool of KV blocks.

Order within a step: every decoding sequence gets one token; then prompts that are under way get chunks, oldest first, within
`max_step_tokens`; then waiting requests are admitted in order of arrival. A sequence is admitted only when blocks for all its known
tokens are there, so a prefill never stops half-way; only decoding grows, and when no block is left the newest running sequence is
preempted: its blocks go (full ones stay findable), its tokens, logprobs and stamps stay, and it waits at the front to be recomputed.
Waiting sequences of which a block source has more than the device fetch first (`engine.fetch`); what waits behind them goes ahead.
While others run, blocks that arrive are copied a few at a time; in a decode engine prompts are computed a few tokens at a time (`pace`).
What is left of the step goes to guesses (`speculation`): tokens that decoding sequences process on trial. They preempt nobody.

Knows nothing of the model, of sampling or of why a sequence ends. Shape suffixes: S sequences of the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from slipstream.engine.fetch import BlockSource, Fetches
from slipstream.engine.kv import BlockPool, KvCache
from slipstream.engine.pace import Pace
from slipstream.engine.prefix import PrefixCache
from slipstream.engine.sequence import Sequence, SlotTable
from slipstream.engine.speculation import Drafter
from slipstream.serving.keys import extend_keys, tail_key

ANY_VERSION = range(-1, 1 << 31)
COPY_BYTES = 4 << 20
"""Of blocks that arrive, in a step in which others run: about a millisecond."""
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: sequences by slot, and how many tokens each processes. Decoding ones first."""

    slots_S: np.ndarray
    counts_S: np.ndarray
    samples_S: np.ndarray
    """Whether the sequence's last known token is among those processed: then it samples."""
    num_decode: int
    num_tokens: int
    drafts_S: np.ndarray
    """How many of the tokens are guesses behind the last known one."""
    num_drafts: int = 0

    @property
    def num_prefill(self) -> int:
        return self.num_tokens - self.num_decode - self.num_drafts


class Scheduler:
    """Waiting and running sequences. `running` is in order of admission, the newest last; it is replaced, never mutated."""

    def __init__(
        self,
        table: SlotTable,
        cache: KvCache,
        max_step_tokens: int,
        prefix_cache: bool,
        drafter: Drafter | None = None,
        sources: Ordered[BlockSource] = (),
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`sources` are asked in order, through the prefix cache; they call `wake`, from any thread, when a plan would find more."""
        self.table = table
        self.pool = BlockPool(cache.num_blocks)
        self.prefix = PrefixCache(self.pool) if prefix_cache else None
        self.fetches: Fetches | None = None
        if self.prefix is not None:
            self.fetches = Fetches(self.pool, self.prefix, cache.versions_N, table.block_tokens, sources, wake)
        self.versions = ANY_VERSION
        """Policy versions whose KV may be used."""
        self.copies = Pace(max(1, COPY_BYTES * cache.num_blocks // cache.nbytes))
        """Blocks."""
        self.prompts: Pace | None = None
        """Prompt tokens of a step in which others decode; None: what `max_step_tokens` leaves."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.tokens_cached = 0
        self.hit_tokens: Counter[str] = Counter()
        """`Completion.cached_by_tier` of everything that was admitted."""
        self._cache = cache
        self._drafter = drafter
        self._max_step_tokens = max_step_tokens
        self._at: dict[int, Sequence] = {}
        self._order_S = np.zeros(0, np.int64)

    def at(self, slot: int) -> Sequence:
        return self._at[slot]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.table.block_tokens)

    def plan(self, version: int, now: float) -> Plan | None:
        """The next step, or None when nothing can run. Blocks that the step fills become findable here: see `prefix`.

        `version` is stamped on new blocks and on sequences that are admitted; `now` (seconds) on the latter.
        """
        if self.fetches is not None:
            self._fetch(self.fetches, now)
        decode_S = self._grow(version)
        room = self._max_step_tokens - len(decode_S)
        limit = budget = min(room, self.prompts.limit) if self.prompts is not None and len(decode_S) else room
        slots, counts = [], []
        for sequence in self._prefilling(budget, version, now):
            chunk = min(budget, self._missing(sequence))
            self._make_findable(sequence, int(self.table.context_R[sequence.slot]) + chunk)
            slots.append(sequence.slot)
            counts.append(chunk)
            budget -= chunk
            if budget == 0:
                break
        if self.prompts is not None:
            self.prompts.note(was_short=budget == 0 and limit < room)
        left = room - (limit - budget)
        slots_S = np.concatenate([decode_S, np.array(slots, np.int64)]) if slots else decode_S
        if not len(slots_S):
            return None
        counts_S = np.ones(len(slots_S), np.int32)
        counts_S[len(decode_S) :] = counts
        samples_S = self.table.context_R[slots_S] + counts_S == self.table.length_R[slots_S]
        drafts_S = self._draft(decode_S, len(slots_S), left, version)
        drafted = int(drafts_S.sum())
        return Plan(slots_S, counts_S + drafts_S, samples_S, len(decode_S), self._max_step_tokens - left + drafted, drafts_S, drafted)

    def trim(self, slots_S: np.ndarray) -> None:
        """Give back the blocks of these decoding sequences in which only rejected guesses lie."""
        table = self.table
        needed_S = -(-table.context_R[slots_S] // table.block_tokens)
        for i in np.flatnonzero(table.num_blocks_R[slots_S] > needed_S).tolist():
            self.pool.release(table.pop_blocks(self._at[int(slots_S[i])], int(needed_S[i])))

    def leave(self, sequences: list[Sequence]) -> None:
        """Take running sequences out; their full blocks stay findable. Whether they wait again is the caller's business."""
        for sequence in sequences:
            slot = sequence.slot
            context = int(self.table.context_R[slot])
            if self.prefix is not None:
                extend_keys(sequence.keys, self.table.tokens_RT[slot, :context], sequence.request.salt, self.table.block_tokens)
                self._make_findable(sequence, context, first=0)
            self.pool.release(self.table.leave(sequence))
            del self._at[slot]
        self.running = [sequence for sequence in self.running if sequence.slot >= 0]
        self._order_S = np.array([sequence.slot for sequence in self.running], np.int64)

    def withdraw(self, sequences: list[Sequence]) -> None:
        """Take these out of the queue; those that do not run."""
        if self.fetches is not None:
            for sequence in sequences:
                self.waiting.extendleft(reversed(self.fetches.cancel(sequence)))
        gone = {id(sequence) for sequence in sequences}
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in gone)

    def stop_fetching(self) -> None:
        """What waits for blocks waits in the queue again."""
        if self.fetches is not None:
            self.waiting.extendleft(reversed(self.fetches.cancel_all()))

    def expire(self, versions: range) -> None:
        """From now on only KV that these versions wrote is used.

        Other blocks are not found any more, and running sequences that hold one wait, in order, to be computed again.
        """
        self.versions = versions
        self.stop_fetching()
        sequences = [s for s in self.running if any(int(version) not in versions for version in self._cache.versions_N[s.blocks])]
        self.leave(sequences)
        self.waiting.extendleft(reversed(sequences))
        if self.prefix is not None:
            self.prefix.drop(lambda block: int(self._cache.versions_N[block]) not in versions)

    def check_integrity(self) -> None:
        """Raises StateError unless free + cached + used = total and every reference is accounted for."""
        fetching = self.fetches.held() if self.fetches is not None else ()
        self.pool.check_integrity(chain((sequence.blocks for sequence in self.running), fetching))

    def _fetch(self, fetches: Fetches, now: float) -> None:
        """Take in what sources have brought, and ask them for the sequences that are next in the queue; some answer at once."""
        most = self.copies.limit if self.running else UNLIMITED
        back, most = fetches.collect(now, self.versions, most)
        self.waiting.extendleft(reversed(back))
        while self._ask(fetches, now):
            back, most = fetches.collect(now, self.versions, most)
            self.waiting.extendleft(reversed(back))
        self.copies.note(was_short=most <= 0)

    def _ask(self, fetches: Fetches, now: float) -> bool:
        """Whether a sequence has left the queue to wait for blocks."""
        room = self.table.free - len(fetches)
        asked = [sequence for sequence in islice(self.waiting, max(0, room)) if fetches.wants(sequence)]
        begun = False
        for sequence in asked:
            hit = self._match(sequence)
            keys = sequence.keys[len(hit) : self._whole_blocks(sequence)]
            if self._has_room(sequence, hit) and fetches.begin(sequence, hit, keys, self._tail_key(sequence), now):
                self.waiting.remove(sequence)
                begun = True
        return begun

    def _missing(self, sequence: Sequence) -> int:
        return int(self.table.length_R[sequence.slot] - self.table.context_R[sequence.slot])

    def _grow(self, version: int) -> np.ndarray:
        """Slots that decode, each with a block for its next token; preempts the newest sequences until there is one."""
        table = self.table
        while True:
            slots_S = self._order_S
            context_S = table.context_R[slots_S]
            decode_S = slots_S[table.length_R[slots_S] - context_S == 1]
            lacking = decode_S[table.context_R[decode_S] >= table.num_blocks_R[decode_S] * table.block_tokens]
            for slot in lacking.tolist():
                if self.pool.available == 0:
                    self._make_room()
                    break
                self._append_blocks(self._at[slot], 1, version)
            else:
                return decode_S

    def _make_room(self) -> None:
        """Give up the newest fetch, which costs least, or else the newest running sequence."""
        if self.fetches:
            self.waiting.extendleft(reversed(self.fetches.cancel_newest()))
        else:
            self._preempt(self.running[-1])

    def _draft(self, decode_S: np.ndarray, sequences: int, budget: int, version: int) -> np.ndarray:
        """Guesses of each of the step's sequences (the first of which decode), with blocks for them; fewer where there are no blocks."""
        drafts_S = np.zeros(sequences, np.int32)
        if self._drafter is None:
            return drafts_S
        table, drafts = self.table, drafts_S[: len(decode_S)]
        if not self._drafter.draft(decode_S, self._max_step_tokens - budget, budget, drafts):
            return drafts_S
        known_S = table.context_R[decode_S] + 1
        lacking_S = -(-(known_S + drafts) // table.block_tokens) - table.num_blocks_R[decode_S]
        for i in np.flatnonzero(lacking_S > 0).tolist():
            slot = int(decode_S[i])
            self._append_blocks(self._at[slot], min(int(lacking_S[i]), self.pool.available), version)
            drafts[i] = min(drafts[i], table.num_blocks_R[slot] * table.block_tokens - known_S[i])
        return drafts_S

    def _preempt(self, sequence: Sequence) -> None:
        self.leave([sequence])
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _append_blocks(self, sequence: Sequence, count: int, version: int) -> None:
        blocks = self.pool.allocate(count)
        self._cache.versions_N[blocks] = version
        self.table.append_blocks(sequence, blocks)

    def _prefilling(self, budget: int, version: int, now: float) -> Iterator[Sequence]:
        """Running sequences with more than one token to process, then newly admitted ones. Stop taking them when the budget is used up."""
        if budget <= 0:
            return
        missing_S = self.table.length_R[self._order_S] - self.table.context_R[self._order_S]
        for slot in self._order_S[missing_S > 1].tolist():
            yield self._at[slot]
        while self.waiting and self.table.free and self._admit(self.waiting[0], version, now):
            yield self.waiting.popleft()

    def _admit(self, sequence: Sequence, version: int, now: float) -> bool:
        """Give it a slot and blocks for all its known tokens, unless that would leave running ones without a block to grow into."""
        hit = self._match(sequence)
        if not self._has_room(sequence, hit):
            return False
        self.pool.share(hit)
        cached = len(hit) * self.table.block_tokens
        self.table.enter(sequence, hit, cached)
        self._at[sequence.slot] = sequence
        if self._drafter is not None:
            self._drafter.enter(sequence.slot)
        self._append_blocks(sequence, self.blocks_for(len(sequence.tokens_T)) - len(hit), version)
        cached += self._copy_tail(sequence, len(hit))
        sequence.stamp(version, len(sequence.logprobs_N))
        if not sequence.admitted_s:
            sequence.admitted_s, sequence.cached_tokens = now, cached
            self.hit_tokens.update(sequence.cached_by_tier)
        sequence.asked = 0
        self.tokens_cached += cached
        self.running = [*self.running, sequence]
        self._order_S = np.append(self._order_S, sequence.slot)
        return True

    def _has_room(self, sequence: Sequence, hit: list[int]) -> bool:
        """Whether it can have blocks for all its known tokens, beside a block for each running sequence to grow into."""
        needed = self.blocks_for(len(sequence.tokens_T)) - len(hit) + sum(map(self.pool.is_idle, hit))
        return needed + len(self.running) <= self.pool.available or (not self.running and needed <= self.pool.available)

    def _whole_blocks(self, sequence: Sequence) -> int:
        """Blocks that its prefix can take from elsewhere: never its last token, which must be processed to sample from."""
        return (len(sequence.tokens_T) - 1) // self.table.block_tokens

    def _match(self, sequence: Sequence) -> list[int]:
        """Findable blocks of its prefix."""
        if self.prefix is None:
            return []
        extend_keys(sequence.keys, sequence.tokens_T, sequence.request.salt, self.table.block_tokens)
        return self.prefix.match(sequence.keys[: self._whole_blocks(sequence)])

    def _tail_key(self, sequence: Sequence) -> bytes | None:
        """Of the block that its tokens but the last end in, if they do not end with a full one. `_match` comes first."""
        whole = self._whole_blocks(sequence)
        return tail_key(sequence.keys[:whole], sequence.tokens_T[:-1], sequence.request.salt, self.table.block_tokens)

    def _copy_tail(self, sequence: Sequence, hit: int) -> int:
        """Fill the first of its own blocks from one which a peer has brought, if all before it was found; how many tokens that is."""
        whole, size = self._whole_blocks(sequence), self.table.block_tokens
        if self.prefix is None or not self.prefix.has_tails or hit < whole:
            return 0
        key = self._tail_key(sequence)
        source = self.prefix.find_tail(key) if key is not None else None
        if source is None:
            return 0
        self._cache.copy(source, sequence.blocks[whole])
        context = self.table.context_R[sequence.slot] = len(sequence.tokens_T) - 1
        return int(context) - whole * size

    def _make_findable(self, sequence: Sequence, context: int, first: int | None = None) -> None:
        """Enter its full blocks up to `context` tokens into the prefix cache."""
        if self.prefix is None:
            return
        if first is None:
            first = int(self.table.context_R[sequence.slot]) // self.table.block_tokens
        for i in range(first, context // self.table.block_tokens):
            self.prefix.insert(sequence.keys[i], sequence.blocks[i])
