import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest

from slipstream.envs.hooks import AbandonedError, Workers, run_hook
from slipstream.errors import EnvError
from tests.waiting import HUNG_S, pass_deadlines, until


async def test_coroutine_functions_run_on_the_loop_and_plain_ones_in_a_daemon_thread():
    async def on_loop():
        return threading.current_thread()

    def in_thread():
        return threading.current_thread()

    assert await run_hook(on_loop, timeout=HUNG_S) is threading.current_thread()
    worker = await run_hook(in_thread, timeout=HUNG_S)
    assert worker is not threading.current_thread()
    assert worker.daemon


async def test_a_thread_that_returns_in_time_is_used_again():
    workers = Workers()
    idents = {await workers.call(threading.get_ident, (), HUNG_S) for _ in range(20)}
    assert len(idents) == 1


async def test_calls_that_wait_for_one_another_all_get_a_thread():
    barrier = threading.Barrier(10)
    await asyncio.gather(*(Workers().call(barrier.wait, (HUNG_S,), HUNG_S) for _ in range(10)))


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("of the hook itself")])
async def test_what_a_hook_raises_reaches_the_caller(error):
    def in_thread():
        raise error

    async def on_loop():
        raise error

    for fn in (in_thread, on_loop):
        with pytest.raises(type(error), match=str(error)):
            await run_hook(fn, timeout=HUNG_S)


async def test_a_hook_that_calls_exit_does_not_kill_its_thread():
    workers = Workers()
    with pytest.raises(EnvError, match="SystemExit: 3"):
        await workers.call(exit_with, (3,), HUNG_S)
    assert await workers.call(int, ("7",), HUNG_S) == 7


def exit_with(code):
    raise SystemExit(code)


async def overrun(workers: Workers, hook: Callable[[threading.Event], None]) -> None:
    """Call a hook that says when it has begun, with a deadline that passes then."""
    begun = threading.Event()
    call = asyncio.create_task(workers.call(hook, (begun,), 9))
    await until(begun.is_set)
    pass_deadlines()
    with pytest.raises(EnvError, match=rf"{hook.__name__} did not return within 9 s \(turn_timeout_s\)"):
        await call


@pytest.fixture
def hangs(release):
    """A hook that no interruption ends, as a call into C."""

    def hang(begun):
        while not release.is_set():
            with contextlib.suppress(AbandonedError):
                begun.set()
                release.wait()

    return hang


async def test_a_hung_thread_is_abandoned_counted_and_replaced(hangs):
    workers = Workers()
    await overrun(workers, hangs)
    assert workers.hung == 1
    assert await workers.call(int, ("7",), HUNG_S) == 7


async def test_too_many_hung_threads_refuse_new_calls_until_some_return(hangs, release):
    workers = Workers(max_hung=3)
    for _ in range(3):
        await overrun(workers, hangs)
    with pytest.raises(EnvError, match=r"3 earlier environment calls still hang .*limit 3"):
        await workers.call(int, ("7",), HUNG_S)
    release.set()
    await until(lambda: not workers.hung)
    assert await workers.call(int, ("7",), HUNG_S) == 7


async def test_a_cancelled_call_counts_as_hung_until_its_thread_returns(hangs):
    workers, begun = Workers(), threading.Event()
    task = asyncio.create_task(workers.call(hangs, (begun,), HUNG_S))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers.hung == 1


async def test_an_async_hook_that_never_returns_misses_its_deadline():
    async def hangs():
        await asyncio.Event().wait()

    with pytest.raises(EnvError, match=r"hangs did not return within 0.01 s"):
        await run_hook(hangs, timeout=0.01)


async def test_a_hook_that_spins_is_ended_with_its_deadline():
    workers, ended = Workers(), threading.Event()

    def spins(begun):
        try:
            begun.set()
            while True:
                pass
        finally:
            ended.set()

    await overrun(workers, spins)
    assert ended.wait(HUNG_S)
    await until(lambda: not workers.hung)
    assert await workers.call(int, ("7",), HUNG_S) == 7


async def test_calls_that_end_just_at_their_deadline_leave_the_books_in_order():
    """Whether the interruption finds the thread before, in or after the hook."""
    workers, done = Workers(max_hung=10_000), 0

    def hook(turns):
        for _ in range(turns):
            pass

    async def one(i):
        nonlocal done
        try:
            await workers.call(hook, (i % 50 * 2_000,), HUNG_S if i % 7 == 6 else i % 7 * 1e-4)
            done += 1
        except EnvError:
            pass

    for start in range(0, 2000, 20):
        await asyncio.gather(*(one(i) for i in range(start, start + 20)))
    await until(lambda: not workers.hung)
    assert 0 < done < 2000
    assert all(worker._thread.is_alive() for worker in workers._idle)
    assert await asyncio.gather(*(workers.call(int, ("7",), HUNG_S) for _ in range(20))) == [7] * 20
