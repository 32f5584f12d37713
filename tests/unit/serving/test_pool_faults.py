"""The pool under trouble: breaker, drain, health, slow and elastic replicas, a full queue; and that no request is lost in the books."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineBusy, EngineError, EngineUnavailable, RequestError, StateError
from slipstream.serving.members import DnsSource, FolderSource, UrlSource, source_of
from slipstream.serving.pool import EnginePool, RouterFull
from tests.unit.serving.test_pool import Process, ask, machine, until_ready  # noqa: F401 (a fixture)
from tests.waiting import until

OFTEN = {"health_interval_s": 0.005}


async def up(m, count: int, **versions):
    engines = [m.start(i, version=0) for i in range(count)]
    await until_ready(m)
    return engines


async def test_a_replica_that_answers_checks_but_fails_requests_is_shut_out_and_tried_again_later(machine):  # noqa: F811
    m = machine(2, breaker_failures=2, breaker_open_s=0.05)
    engines = await up(m, 2)
    tried = []

    async def fail(request):
        tried.append(request.id)
        raise EngineUnavailable("a step failed")

    works, engines[0].generate = engines[0].generate, fail
    for i in range(20):
        await m.pool.generate(ask(f"s{i}/0"))
        await until(lambda: all(replica.up for replica in m.pool.fleet.replicas))
    assert len(tried) == 2 and m.pool.metrics()["router/breaker/engine-0"] == 2
    engines[0].generate = works
    await asyncio.sleep(0.06)
    assert m.pool.metrics()["router/breaker/engine-0"] == 1
    await asyncio.gather(*(m.pool.generate(ask(f"t{i}/0")) for i in range(6)))
    assert engines[0].served and m.pool.metrics()["router/breaker/engine-0"] == 0
    assert m.pool.retries == 2


async def test_with_every_breaker_open_a_request_waits_for_the_next_try(machine):  # noqa: F811
    m = machine(1, breaker_failures=1, breaker_open_s=0.02)
    (engine,) = await up(m, 1)
    works, failures = engine.generate, 2

    async def fail_twice(request):
        nonlocal failures
        if failures:
            failures -= 1
            raise EngineUnavailable("a step failed")
        return await works(request)

    engine.generate = fail_twice
    answers = await asyncio.gather(*(m.pool.generate(ask(f"s{i}/0")) for i in range(4)))
    assert len(answers) == 4 and m.pool.retries == 2


async def test_a_draining_replica_gets_nothing_new_and_drain_returns_when_what_ran_has_ended(machine):  # noqa: F811
    m = machine(2)
    engines = await up(m, 2)
    for engine in engines:
        engine.hold.clear()
    running = [asyncio.create_task(m.pool.generate(ask(f"s{i}/0"))) for i in range(2)]
    await until(lambda: all(engine.served for engine in engines))
    draining = asyncio.create_task(m.pool.fleet.drain("engine-0"))
    engines[1].hold.set()
    await running[engines[0].served == ["s0/0"]]
    for i in range(4):
        await m.pool.generate(ask(f"t{i}/0"))
    assert len(engines[0].served) == 1 and not draining.done()
    engines[0].hold.set()
    await asyncio.gather(*running, draining)
    mine = engines[0].served[0].removesuffix("/0")
    await m.pool.generate(ask(f"{mine}/1"))
    assert engines[1].served[-1] == f"{mine}/1" and m.pool.router.moves == {"draining": 1}
    m.pool.fleet.undrain("engine-0")
    await asyncio.gather(*(m.pool.generate(ask(f"u{i}/0")) for i in range(4)))
    assert len(engines[0].served) > 1
    with pytest.raises(StateError, match="no replica is named 'engine-9'; there are engine-0, engine-1"):
        await m.pool.fleet.drain("engine-9")


async def test_a_replica_that_says_it_drains_is_left_alone_by_every_pool_and_still_gets_weights(machine):  # noqa: F811
    m = machine(2, **OFTEN)
    engines = await up(m, 2)
    says, state = True, engines[0].state
    engines[0].state = lambda: _draining(state, says)
    await until(lambda: m.pool.fleet.named("engine-0").draining)
    await asyncio.gather(*(m.pool.generate(ask(f"s{i}/0")) for i in range(4)))
    assert not engines[0].served and m.pool.metrics()["router/replicas/draining"] == 1
    says = False
    await until(lambda: not m.pool.fleet.named("engine-0").draining)
    await asyncio.gather(*(m.pool.generate(ask(f"t{i}/0")) for i in range(4)))
    assert engines[0].served


async def _draining(state, says):
    return replace(await state(), draining=says)


async def test_a_replica_that_stops_answering_is_found_by_its_health_check(machine):  # noqa: F811
    m = machine(2, **OFTEN, health_deadline_s=0.02)
    engines = await up(m, 2)
    never = asyncio.Event()

    async def hang():
        await never.wait()

    engines[0].state = hang
    await until(lambda: not m.pool.fleet.named("engine-0").up)
    assert "no state within 0.02 s" in m.pool.fleet.last_error
    await asyncio.gather(*(m.pool.generate(ask(f"s{i}/0")) for i in range(4)))
    assert not engines[0].served and m.pool.fleet.counts["down"] == 1


async def test_a_health_check_notices_a_process_that_was_restarted_at_the_same_address(machine):  # noqa: F811
    m = machine(1, **OFTEN)
    (engine,) = await up(m, 1)
    engine.live = -1
    await until(lambda: not m.pool.fleet.named("engine-0").ready)
    assert m.pool.fleet.counts["down"] == 1


async def test_a_request_that_fails_after_its_process_was_replaced_says_nothing_about_the_new_one(machine):  # noqa: F811
    m = machine(1)
    (first,) = await up(m, 1)
    first.hold.clear()
    call = asyncio.create_task(m.pool.generate(ask("s/0")))
    await until(lambda: first.served)
    first.alive = False
    second = m.start(0, version=0)
    await m.pool.abort(["x"])
    await until(lambda: m.pool.fleet.named("engine-0").ready)
    first.hold.set()
    assert (await call).id == "s/0" and second.served == ["s/0"]
    assert (m.pool.fleet.counts["down"], m.pool.retries) == (1, 1)


async def test_a_slow_replica_is_kept_out_for_a_while_and_the_last_one_never(machine):  # noqa: F811
    m = machine(3, **OFTEN, breaker_open_s=10.0, policy="round_robin", sticky=False, slow_factor=4)
    engines = await up(m, 3)

    def takes(engine: Process, seconds: float):
        works = engine.generate

        async def generate(request):
            await asyncio.sleep(seconds)
            return await works(request)

        engine.generate = generate

    for engine, seconds in zip(engines, (0.005, 0.03, 0.005), strict=True):
        takes(engine, seconds)
    for i in range(30):
        await m.pool.generate(ask(f"s{i}/0"))
    await until(lambda: m.pool.fleet.counts["slow"] == 1)
    before = len(engines[1].served)
    for i in range(12):
        await m.pool.generate(ask(f"t{i}/0"))
    assert len(engines[1].served) == before and m.pool.metrics()["router/breaker/engine-1"] == 2
    m.pool.fleet.named("engine-0").told_to_drain = m.pool.fleet.named("engine-2").told_to_drain = True
    m.pool.fleet.named("engine-1").breaker.reset()
    for i in range(12):
        await m.pool.generate(ask(f"u{i}/0"))
    await asyncio.sleep(0.02)
    assert m.pool.fleet.counts["slow"] == 1


async def test_more_waiting_requests_than_allowed_are_refused_with_the_bound_and_counted(machine):  # noqa: F811
    m = machine(1, max_waiting=2)
    waiting = [asyncio.create_task(m.pool.generate(ask(f"s{i}/0"))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RouterFull, match=r"router\.max_waiting = 2"):
        await m.pool.generate(ask("s2/0"))
    assert issubclass(RouterFull, EngineBusy) and m.pool.metrics()["router/requests/waiting"] == 2
    m.start(0, version=0)
    await asyncio.gather(*waiting)
    assert m.pool.rejections == {"full": 1} and m.pool.answers == 2


async def test_an_endpoint_file_that_appears_is_a_replica_and_one_that_disappears_is_let_go(machine, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("slipstream.serving.fleet.FIND_EVERY_S", 0.0)
    m = machine(1, **OFTEN)
    (first,) = await up(m, 1)
    m.files.append(tmp_path / "engine-7.json")
    extra = m.start(1, version=0)
    await until(lambda: any(replica.name == "engine-7" and replica.ready for replica in m.pool.fleet.replicas))
    for engine in (first, extra):
        engine.hold.clear()
    running = [asyncio.create_task(m.pool.generate(ask(f"s{i}/0"))) for i in range(2)]
    await until(lambda: extra.served)
    m.files[1].unlink()
    await until(lambda: m.pool.fleet.named("engine-7").leaving)
    first.hold.set()
    await m.pool.generate(ask("t/0"))
    assert len(extra.served) == 1
    extra.hold.set()
    await asyncio.gather(*running)
    await until(lambda: [replica.name for replica in m.pool.fleet.replicas] == ["engine-0"])
    m.files[0].unlink()
    await asyncio.sleep(0.02)
    assert [replica.name for replica in m.pool.fleet.replicas] == ["engine-0"], "the run's own always belong to it"


async def test_engines_of_somebody_else_are_named_by_address_and_need_a_token(monkeypatch, tmp_path):
    config = RouterConfig(urls=("http://10.0.0.5:8000", "http://10.0.0.6:8000"))
    monkeypatch.delenv("SLIPSTREAM_ENGINE_TOKEN", raising=False)
    with pytest.raises(Exception, match="SLIPSTREAM_ENGINE_TOKEN"):
        EnginePool.of_run(tmp_path, 2, config)
    monkeypatch.setenv("SLIPSTREAM_ENGINE_TOKEN", "secret")
    source = source_of(config, tmp_path, 2)
    assert isinstance(source, UrlSource) and list(source.expected) == ["10.0.0.5:8000", "10.0.0.6:8000"]
    assert source.expected["10.0.0.5:8000"]().token == "secret"
    assert isinstance(source_of(RouterConfig(), tmp_path, 2), FolderSource)


async def test_why_a_replica_does_not_come_up_is_said_once(machine, caplog):  # noqa: F811
    m = machine(1)
    engine, asked = m.start(0, version=0), []

    async def refuse():
        asked.append(1)
        raise EngineError("HTTP 401: wrong token")

    works, engine.state = engine.state, refuse
    waiting = asyncio.create_task(m.pool.generate(ask("a/0")))
    await until(lambda: len(asked) > 3)
    assert caplog.text.count("does not come up") == 1
    engine.state = works
    await waiting


async def test_a_name_stands_for_as_many_engines_as_it_has_addresses(monkeypatch):
    addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2"]

    async def getaddrinfo(host, port, **_):
        if not addresses:
            raise OSError("no such host")
        return [(None, None, None, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    source = DnsSource(["http://engines.example:8000"], "t")
    found = await source.find()
    assert list(found) == ["10.0.0.1:8000", "10.0.0.2:8000"] and found["10.0.0.1:8000"]().url == "http://10.0.0.1:8000"
    addresses.clear()
    with pytest.raises(EngineUnavailable, match=r"'engines\.example' does not resolve"):
        await source.find()


async def test_a_source_that_fails_for_a_moment_removes_nobody(machine, monkeypatch):  # noqa: F811
    monkeypatch.setattr("slipstream.serving.fleet.FIND_EVERY_S", 0.0)
    m = machine(1, **OFTEN)
    await up(m, 1)
    tries = []

    async def find():
        tries.append(1)
        raise EngineUnavailable("no name server")

    m.pool.fleet._source.find = find
    await until(lambda: len(tries) > 3)
    assert (await m.pool.generate(ask("s/0"))).id == "s/0"


@pytest.mark.parametrize("seed", range(4))
async def test_every_request_is_answered_or_refused_by_reason_whatever_happens(machine, seed, monkeypatch):  # noqa: F811
    """Replicas die, come back, fill up, hang and fail steps; callers go away; the wall clock jumps."""
    monkeypatch.setattr(time, "time", random.Random(seed).random)
    rng = random.Random(seed)
    m = machine(3, patience_s=0.2, **OFTEN, breaker_open_s=0.01, breaker_failures=3)
    engines = await up(m, 3)

    def troubled(engine: Process):
        works = engine.generate

        async def generate(request):
            await asyncio.sleep(rng.choice([0, 0, 0.002]))
            draw = rng.random()
            if draw < 0.15:
                raise EngineUnavailable("a step failed")
            if draw < 0.25:
                raise EngineBusy("full")
            if draw < 0.3:
                raise RequestError("never")
            return await works(request)

        engine.generate = generate

    for engine in engines:
        troubled(engine)
    calls, total = [], 120
    for i in range(total):
        calls.append(asyncio.create_task(m.pool.generate(ask(f"s{i % 10}/{i}"))))
        if rng.random() < 0.1:
            rng.choice(calls).cancel()
        if rng.random() < 0.05:
            which = rng.randrange(3)
            engines[which].alive = False
            engines[which] = m.start(which, version=0)
            troubled(engines[which])
        if rng.random() < 0.3:
            await asyncio.sleep(0.001)
    results = await asyncio.gather(*calls, return_exceptions=True)
    answered = sum(not isinstance(result, BaseException) for result in results)
    never_began = total - m.pool.answers - sum(m.pool.rejections.values())
    assert answered == m.pool.answers > 20
    assert all(isinstance(result, EngineError | asyncio.CancelledError) for result in results if isinstance(result, BaseException))
    assert 0 <= never_began <= sum(isinstance(result, asyncio.CancelledError) for result in results)
    metrics = m.pool.metrics()
    assert metrics["router/requests/in_flight"] == 0 and metrics["router/requests/waiting"] == 0
    sent = sum(m.pool.router.requests.values())
    assert sum(value for key, value in metrics.items() if key.startswith("router/served/")) == sent >= m.pool.answers
