from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.run import ConcurrencyConfig
from slipstream.orchestrator.concurrency import Gate, Hold, hold, infra_delay, next_limit
from slipstream.types import EngineState

OPEN = Gate(room=8, in_flight=0, group_size=4, limit=8, now=10.0, rate_opens_at=0.0, infra_opens_at=0.0)
CONFIG = ConcurrencyConfig(initial=16, min=4, max=64)


def engine(**fields):
    return EngineState(0, "", **{"running": 8, **fields})


def test_a_group_starts_when_nothing_holds_it():
    assert hold(OPEN) is None


def test_each_limit_holds_a_group_with_its_own_reason():
    assert hold(replace(OPEN, room=0)) == (Hold.version, None)
    assert hold(replace(OPEN, in_flight=5)) == (Hold.slots, None)
    assert hold(replace(OPEN, rate_opens_at=12.0)) == (Hold.rate, 2.0)
    assert hold(replace(OPEN, infra_opens_at=11.0)) == (Hold.infra, 1.0)


def test_a_group_may_overrun_the_room_so_that_odd_batch_sizes_fill():
    assert hold(replace(OPEN, room=0.5)) is None


def test_a_group_larger_than_the_limit_runs_alone():
    assert hold(replace(OPEN, group_size=100)) is None
    assert hold(replace(OPEN, group_size=100, in_flight=1)) == (Hold.slots, None)


def test_the_limit_grows_by_a_constant_and_shrinks_by_a_share():
    assert next_limit(16, 16, 4, engine(), CONFIG) == 20
    assert next_limit(16, 16, 4, engine(kv_used_frac=0.95), CONFIG) == 12


def test_the_limit_does_not_grow_while_something_else_holds_rollouts_back():
    assert next_limit(16, 3, 4, engine(), CONFIG) == 16


def test_the_limit_grows_when_the_next_group_does_not_fit():
    """Groups of 8 under a limit of 13: only one runs, and the five free slots are of no use to anybody."""
    assert next_limit(13, 8, 8, engine(), CONFIG) == 17


def test_a_queue_in_the_engine_keeps_the_limit_without_cutting_it():
    """A group of 8 that arrives at once waits for a step: cutting for it would starve an engine whose cache is nearly empty."""
    assert next_limit(16, 16, 4, engine(running=2, waiting=8, kv_used_frac=0.02), CONFIG) == 16


def test_a_fixed_limit_stays():
    assert next_limit(16, 16, 4, engine(kv_used_frac=1.0), CONFIG.replace(adaptive=False)) == 16


@given(st.integers(4, 64), st.integers(0, 99), st.integers(1, 16), st.floats(0, 1), st.integers(0, 99))
def test_the_limit_stays_within_its_bounds(limit, in_flight, group_size, used, waiting):
    assert 4 <= next_limit(limit, in_flight, group_size, engine(kv_used_frac=used, waiting=waiting), CONFIG) <= 64


def test_failures_of_infrastructure_slow_dispatch_down_to_a_bound():
    assert infra_delay(0) == 0
    assert infra_delay(1) < infra_delay(2) < infra_delay(4)
    assert infra_delay(1000) == 2.0
