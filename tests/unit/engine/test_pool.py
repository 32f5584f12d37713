"""Blocks: free + cached + used = total under any order of requests, growth, ends, aborts and preemption."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.engine.kv import BlockPool
from slipstream.engine.pace import Pace
from slipstream.engine.prefix import PrefixCache
from slipstream.engine.scheduler import COPY_BYTES, Scheduler
from slipstream.engine.sequence import Sequence, SlotTable
from slipstream.errors import StateError
from slipstream.serving.keys import extend_keys
from slipstream.types import GenerateRequest, Sampling

BLOCKS, BLOCK_TOKENS, SEQ_LEN = 12, 2, 24


def make_sequence(name: str, tokens_T: np.ndarray, salt: int) -> Sequence:
    return Sequence(GenerateRequest(name, tokens_T, Sampling(), salt), 0, SEQ_LEN, (), 0.0, tokens_T)


class AnyFetch:
    tier = staticmethod(lambda i: "fake")

    def __init__(self, source: AnySource) -> None:
        self.source = source
        self.arrived, self.over, self.written = 0, False, 0

    @property
    def done(self) -> bool:
        return self.over and self.written == self.arrived

    @property
    def ready(self) -> bool:
        return self.over or self.written < self.arrived

    def write(self, blocks, most: int) -> int:
        assert most > 0
        written = min(self.arrived, len(blocks), self.written + most)
        self.source.versions_N[blocks[self.written : written]] = self.source.version
        self.written = written
        return written

    def cancel(self, late: bool) -> None:
        self.source.fetches.remove(self)


class AnySource:
    """Has every block whose key begins with an even byte; a fetch ends when the machine says so, with as many blocks as it says."""

    timeout_s = 5.0
    brings_tails = True

    def __init__(self, versions_N: np.ndarray) -> None:
        self.versions_N = versions_N
        self.fetches: list[AnyFetch] = []
        self.version = 1

    def find(self, request, keys) -> int:
        return next((i for i, key in enumerate(keys) if key[0] % 2), len(keys))

    def start(self, request, keys, wake) -> AnyFetch:
        self.fetches.append(fetch := AnyFetch(self))
        return fetch


class AnyCache(SimpleNamespace):
    """Blocks of which a step copies one while others run."""

    def __init__(self) -> None:
        super().__init__(num_blocks=BLOCKS, nbytes=BLOCKS * COPY_BYTES, versions_N=np.zeros(BLOCKS, np.int32))

    def copy(self, source: int, target: int) -> None:
        assert source != target
        self.versions_N[target] = self.versions_N[source]


class SchedulerMachine(RuleBasedStateMachine):
    """Plays requests against the scheduler alone: the model is replaced by a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(4, SEQ_LEN, BLOCK_TOKENS)
        cache = AnyCache()
        self.source = AnySource(cache.versions_N)
        self.scheduler = Scheduler(self.table, cache, max_step_tokens=6, prefix_cache=True, sources=[self.source])  # type: ignore[arg-type]
        self.scheduler.prompts = Pace(2)
        self.names = 0
        self.version = 1
        self.now = 1.0
        self.sampled: dict[str, int] = {}

    @rule(length=st.integers(1, 20), kind=st.integers(0, 2), salt=st.integers(0, 1))
    def add(self, length: int, kind: int, salt: int) -> None:
        tokens_T = np.full(length, kind, np.int32)
        self.names += 1
        self.scheduler.waiting.append(make_sequence(f"r{self.names}", tokens_T, salt))

    @rule(steps=st.integers(1, 6), token=st.integers(0, 2))
    def step(self, steps: int, token: int) -> None:
        for _ in range(steps):
            limit = self.scheduler.prompts.limit
            plan = self.scheduler.plan(self.version, self.now)
            if plan is None:
                return
            assert plan.num_tokens == plan.counts_S.sum() <= 6
            assert plan.num_prefill <= limit or not plan.num_decode
            assert len(set(plan.slots_S.tolist())) == len(plan.slots_S)
            self.table.context_R[plan.slots_S] += plan.counts_S
            slots_S = plan.slots_S[plan.samples_S]
            tokens_S = np.full(len(slots_S), token, np.int32)
            _, full_S = self.table.append_sampled(slots_S, tokens_S, np.zeros(len(slots_S), np.float32))
            self.scheduler.leave([self.scheduler.at(slot) for slot in slots_S[full_S].tolist()])

    @precondition(lambda self: self.scheduler.running)
    @rule(pick=st.integers(0, 3))
    def abort(self, pick: int) -> None:
        running = self.scheduler.running
        self.scheduler.leave([running[pick % len(running)]])

    @precondition(lambda self: self.source.fetches)
    @rule(pick=st.integers(0, 3), complete=st.integers(0, 9), done=st.booleans(), version=st.integers(0, 1))
    def arrive(self, pick: int, complete: int, done: bool, version: int) -> None:
        """With `version` 0 the blocks are of the version before."""
        fetch = self.source.fetches[pick % len(self.source.fetches)]
        fetch.arrived, fetch.over = max(complete, fetch.arrived), done
        self.source.version = self.version - 1 + version

    @rule(seconds=st.sampled_from([0.1, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.scheduler.fetches)
    @rule(pick=st.integers(0, 3))
    def abort_a_fetching_one(self, pick: int) -> None:
        fetching = [*self.scheduler.fetches.waiting()]
        self.scheduler.withdraw([fetching[pick % len(fetching)]])

    @rule()
    def recompute(self) -> None:
        self.version += 1
        self.scheduler.expire(range(self.version, self.version + 1))
        assert len(self.scheduler.prefix or ()) == 0 and not self.scheduler.running

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def preempt(self) -> None:
        before = self.scheduler.running[-1]
        known = self.table.tokens_RT[before.slot, : self.table.length_R[before.slot]].tolist()
        self.scheduler._preempt(before)
        assert self.scheduler.waiting[0] is before and before.tokens_T.tolist() == known

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def nothing_of_an_unwanted_version_is_found(self) -> None:
        versions = self.scheduler.versions
        assert all(int(self.source.versions_N[block]) in versions for block in self.scheduler.prefix._key_of)

    @invariant()
    def nobody_is_lost_or_in_two_places(self) -> None:
        everyone = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.fetches.waiting()]
        assert len(everyone) == len(set(map(id, everyone)))

    @invariant()
    def every_running_sequence_has_blocks_for_what_it_knows(self) -> None:
        for sequence in self.scheduler.running:
            have = self.table.num_blocks_R[sequence.slot] * BLOCK_TOKENS
            assert have == len(sequence.blocks) * BLOCK_TOKENS >= self.table.context_R[sequence.slot]
            assert self.table.blocks_RB[sequence.slot, : len(sequence.blocks)].tolist() == sequence.blocks

    def teardown(self) -> None:
        """Whatever has happened, everything that waits can still be finished."""
        for _ in range(4000):
            self.now += 6.0
            if not (self.scheduler.running or self.scheduler.waiting or self.scheduler.fetches):
                break
            assert self.scheduler.plan(self.version, self.now) is not None or not self.scheduler.running
            self.step(1, 0)
        assert not self.scheduler.running and not self.scheduler.waiting and self.scheduler.pool.used == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_the_least_recently_used_cached_block_is_reclaimed_first():
    pool = BlockPool(3)
    prefix = PrefixCache(pool)
    first, second, third = pool.allocate(3)
    for key, block in ((b"1", first), (b"2", second), (b"3", third)):
        prefix.insert(key, block)
        pool.release([block])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(1) == [second]
    assert prefix.match([b"2"]) == [] and prefix.match([b"1"]) == [first]


def test_asking_for_more_blocks_than_there_are_is_a_state_error():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(StateError, match="asked for 2 KV blocks with 1 of 2"):
        pool.allocate(2)


def test_check_integrity_notices_a_lost_reference():
    pool = BlockPool(3)
    held = pool.allocate(2)
    pool.check_integrity([held])
    with pytest.raises(StateError, match="reference counts"):
        pool.check_integrity([held[:1]])


def test_keys_chain_over_the_whole_prefix_and_start_from_the_salt():
    tokens_T = np.arange(8, dtype=np.int32)

    def keys(tokens, salt):
        found: list[bytes] = []
        extend_keys(found, tokens, salt, 4)
        return found

    other_T = tokens_T.copy()
    other_T[0] = 9
    assert len(keys(tokens_T, 0)) == 2
    assert keys(tokens_T, 0)[1] != keys(other_T, 0)[1]
    assert not set(keys(tokens_T, 0)) & set(keys(tokens_T, 1))
    assert keys(tokens_T[:7], 0) == keys(tokens_T, 0)[:1]
