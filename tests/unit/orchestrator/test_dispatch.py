import asyncio

import pytest

from slipstream.errors import EngineUnavailable, RewardError
from slipstream.orchestrator.dispatch import Dispatcher, Flight
from slipstream.orchestrator.ledger import Ledger
from slipstream.types import Outcome, Rollout
from tests.sim import clock
from tests.unit.orchestrator.make import TASK, player, rollout

BLANK = Rollout("g1-0", TASK, "g1", Outcome.cut)


def fly(play, cancel_at=None, verdict=Outcome.stale, timeout_s=10.0):
    """(rollout, seconds until it ended, flight)."""

    async def main():
        loop = asyncio.get_running_loop()
        flight = Flight(play(TASK, "g1-0", "g1", 0), BLANK, timeout_s, grace_s=2.0)
        if cancel_at is not None:
            loop.call_later(cancel_at, flight.cancel, verdict)
        return await flight.ended, loop.time(), flight

    return clock.run(main())


def raising(error):
    async def play(*args):
        raise error

    return play


async def swallow(*args):
    """A player that does not let itself be cancelled."""
    try:
        await asyncio.sleep(1e6)
    except asyncio.CancelledError:
        await asyncio.sleep(100)
    return rollout()


def test_a_rollout_comes_back_as_it_was_played():
    result, seconds, _ = fly(player(3.0))
    assert (result.outcome, result.reward, seconds) == (Outcome.completed, 1.0, 3.0)


def test_a_rollout_past_its_deadline_is_cut_without_a_reward():
    result, seconds, _ = fly(player(99.0))
    assert (result.outcome, result.reward, seconds) == (Outcome.cut, None, 10.0)


def test_a_cancelled_rollout_has_the_outcome_that_it_was_cancelled_for():
    result, seconds, _ = fly(player(99.0), cancel_at=4.0)
    assert (result.outcome, result.reward, seconds) == (Outcome.stale, None, 4.0)


def test_a_player_that_swallows_cancellation_is_abandoned_after_the_grace():
    result, seconds, flight = fly(swallow)
    assert (result.outcome, seconds, flight.abandoned) == (Outcome.cut, 12.0, True)


def test_a_result_that_comes_after_the_verdict_keeps_its_turns_but_no_reward():
    async def stubborn(*args):
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            return rollout("g1-0")

    result, _, flight = fly(stubborn)
    assert (result.outcome, result.reward, len(result.turns), flight.abandoned) == (Outcome.cut, None, 1, False)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(EngineUnavailable("gone"), Outcome.infra_error), (RewardError("nan"), Outcome.reward_error), (ValueError("x"), Outcome.env_error)],
)
def test_an_error_of_a_player_is_sorted_by_its_class_and_never_a_reward(error, outcome):
    result, _, _ = fly(raising(error))
    assert (result.outcome, result.reward) == (outcome, None)
    assert str(error) in result.error


def test_a_player_that_cancels_itself_failed():
    assert fly(raising(asyncio.CancelledError()))[0].outcome is Outcome.infra_error


@pytest.mark.parametrize("returned", [None, rollout("another")])
def test_a_player_that_returns_something_else_failed(returned):
    async def play(*args):
        return returned

    result, _, _ = fly(play)
    assert (result.id, result.outcome) == ("g1-0", Outcome.env_error)
    assert "instead of rollout g1-0" in result.error


def dispatched(script):
    """Run `script(dispatcher)` on a virtual clock."""

    async def main():
        ledger = Ledger(":memory:", synchronous="OFF")
        dispatcher = Dispatcher(ledger, asyncio.get_running_loop().time, grace_s=2.0)
        try:
            return await script(dispatcher)
        finally:
            ledger.close()

    return clock.run(main())


def test_only_what_was_issued_before_the_oldest_version_is_cancelled():
    async def script(dispatcher):
        flights = [dispatcher.issue(player(5.0), TASK, f"g1-{v}", "g1", v, 10.0) for v in range(4)]
        dispatcher.cancel_stale(2)
        return [(await flight.ended).outcome for flight in flights]

    assert dispatched(script) == [Outcome.stale, Outcome.stale, Outcome.completed, Outcome.completed]


def test_every_slot_is_free_again_whatever_the_player_does():
    async def script(dispatcher):
        plays = [player(1.0), player(99.0), swallow, raising(ValueError("x"))]
        flights = [dispatcher.issue(play, TASK, f"g1-{i}", "g1", 0, 10.0) for i, play in enumerate(plays)]
        await asyncio.wait([flight.ended for flight in flights])
        await asyncio.sleep(0)
        before = (len(dispatcher.flights), dispatcher.abandoned, dispatcher.late)
        await asyncio.sleep(200)
        return before, dispatcher.late

    assert dispatched(script) == ((0, 1, 0), 1)


def test_stopping_ends_everything_within_the_grace():
    async def script(dispatcher):
        for i, play in enumerate((player(99.0), swallow)):
            dispatcher.issue(play, TASK, f"g1-{i}", "g1", 0, 50.0)
        await asyncio.sleep(1.0)
        await dispatcher.stop()
        return asyncio.get_running_loop().time(), len(dispatcher.flights)

    assert dispatched(script) == (3.0, 0)


def test_a_retry_waits_for_the_infrastructure_and_a_success_forgives_it():
    async def script(dispatcher):
        loop = asyncio.get_running_loop()
        for i in range(3):
            await dispatcher.issue(raising(EngineUnavailable("gone")), TASK, f"g1-{i}", "g1", 0, 10.0).ended
        await asyncio.sleep(0)
        opens_at = dispatcher.infra_opens_at
        await dispatcher.issue(player(0.0), TASK, "g1-9", "g1", 0, 10.0, attempt=1).ended
        await asyncio.sleep(0)
        return opens_at, loop.time(), dispatcher.infra_streak, dispatcher.infra_opens_at

    opens_at, now, streak, after = dispatched(script)
    assert (now, streak, after) == (opens_at, 0, 0.0)
    assert opens_at == 0.2
