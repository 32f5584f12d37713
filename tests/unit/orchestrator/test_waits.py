import asyncio

import pytest

from slipstream.errors import TrainerError
from slipstream.orchestrator.waits import PERSIST_TRIES, Wake, persist
from tests.sim import clock


def test_a_wake_up_before_the_wait_is_not_lost():
    async def main():
        wake = Wake()
        wake.set()
        return await wake.wait(10.0), await wake.wait(10.0), asyncio.get_running_loop().time()

    assert clock.run(main()) == (True, False, 10.0)


def test_a_write_is_tried_again_until_it_succeeds():
    problems = [ConnectionError("lost"), OSError(28, "No space left on device")]

    async def write():
        if problems:
            raise problems.pop()

    clock.run(persist(write, 1.0, "batch 3"))
    assert problems == []


def test_a_write_that_hangs_is_tried_again():
    calls = []

    async def write():
        calls.append(1)
        if len(calls) < 3:
            await asyncio.sleep(1e6)

    clock.run(persist(write, 1.0, "batch 3"))
    assert len(calls) == 3


def test_a_write_that_never_succeeds_ends_with_what_and_why():
    calls = []

    async def write():
        calls.append(1)
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainerError, match=r"batch 3 cannot be handed .* No space left on device"):
        clock.run(persist(write, 1.0, "batch 3"))
    assert len(calls) == PERSIST_TRIES


def test_a_bug_is_not_tried_again():
    async def write():
        raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        clock.run(persist(write, 1.0, "batch 3"))


def test_a_virtual_clock_notices_that_nothing_can_happen_any_more():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(clock.DeadlockError):
        clock.run(main())


def test_a_virtual_day_takes_no_time():
    async def main():
        await asyncio.sleep(86400.0)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 86400.0
