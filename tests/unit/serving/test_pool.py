"""The pool over fake replicas: who gets which request, failover, and that nobody serves with old weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineBusy, EngineError, EngineUnavailable, StateError
from slipstream.serving.members import FolderSource
from slipstream.serving.pool import MOST_SENDS, EnginePool
from slipstream.types import Completion, EngineState, GenerateRequest, PolicyVersion, Sampling
from tests.waiting import until

V1, V2 = (PolicyVersion(n, f"fingerprint-{n}", n - 1, f"/weights/v{n}") for n in (1, 2))


class Process:
    """One engine process: its weights live and die with it."""

    def __init__(self, name: str, version: int = -1):
        self.name = name
        self.live, self.fingerprint = version, f"fingerprint-{version}"
        self.prepared: PolicyVersion | None = None
        self.calls: list[str] = []
        self.alive = True
        self.busy = False
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        self._touch(f"generate {request.id}")
        if self.busy:
            raise EngineBusy(f"{self.name} is full")
        await self.hold.wait()
        if not self.alive or self.live < 0:
            raise EngineUnavailable(f"{self.name} is gone or has no version")
        tokens_N = np.array([self.live], np.int32)
        return Completion(request.id, tokens_N, np.zeros(1, np.float32), ((self.live, 1),), "stop")

    async def prepare(self, version: PolicyVersion) -> None:
        self._touch(f"prepare {version.number}")
        if version.fingerprint == "wrong":
            raise EngineError(f"{self.name}: wrong fingerprint")
        self.prepared = version

    async def commit(self, number: int) -> None:
        self._touch(f"commit {number}")
        if number != self.live:
            if self.prepared is None or self.prepared.number != number:
                raise EngineError(f"{self.name}: version {number} is not prepared")
            self.live, self.fingerprint, self.prepared = number, self.prepared.fingerprint, None

    async def abort(self, request_ids) -> None:
        self._touch(f"abort {','.join(request_ids)}")

    async def state(self) -> EngineState:
        self._touch("state")
        return EngineState(self.live, self.fingerprint, running=2, kv_used_frac=0.1 * int(self.name[-1]), generated_tokens=10)

    async def close(self) -> None:
        pass

    def _touch(self, call: str) -> None:
        if not self.alive:
            raise EngineUnavailable(f"{self.name}: connection refused")
        self.calls.append(call)

    @property
    def served(self) -> list[str]:
        return [call.removeprefix("generate ") for call in self.calls if call.startswith("generate")]


class Machine:
    """Processes behind endpoint files, and the pool over them."""

    def __init__(self, folder: Path, replicas: int, patience_s: float = 5.0, **router: Any):
        self.files = [folder / f"engine-{i}.json" for i in range(replicas)]
        self.processes: dict[str, Process] = {}
        config = RouterConfig(patience_s=patience_s, **router)
        self.pool = EnginePool(FolderSource(folder, replicas), config, connect=lambda endpoint: self.processes[endpoint.url])
        self._pid = 0

    def start(self, replica: int, version: int = -1) -> Process:
        self._pid += 1
        process = Process(f"engine-{replica}", version)
        endpoint = {"url": f"http://host:{self._pid}", "token": "t", "pid": self._pid}
        self.processes[endpoint["url"]] = process
        self.files[replica].write_text(json.dumps(endpoint))
        return process

    async def publish(self, version: PolicyVersion) -> None:
        await self.pool.prepare(version)
        await self.pool.commit(version.number)


@pytest.fixture
async def machine(tmp_path):
    machines = []

    def make(replicas: int, patience_s: float = 5.0, **router: Any) -> Machine:
        machines.append(Machine(tmp_path, replicas, patience_s, **router))
        return machines[-1]

    yield make
    for made in machines:
        await made.pool.close()


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(name, np.array([1], np.int32), Sampling())


async def test_turns_of_a_rollout_stay_on_one_replica_and_rollouts_spread(machine):
    m = machine(2)
    engines = [m.start(0, version=0), m.start(1, version=0)]
    await until_ready(m)
    for engine in engines:
        engine.hold.clear()
    calls = [asyncio.create_task(m.pool.generate(ask(f"env/train/{i}/0"))) for i in range(4)]
    await until(lambda: sum(len(e.served) for e in engines) == 4)
    assert [len(engine.served) for engine in engines] == [2, 2]
    for engine in engines:
        engine.hold.set()
    await asyncio.gather(*calls)
    for turn in (1, 2):
        for i in range(4):
            await m.pool.generate(ask(f"env/train/{i}/{turn}"))
    homes = [{name.rpartition("/")[0] for name in engine.served} for engine in engines]
    assert not homes[0] & homes[1]


async def until_ready(m: Machine) -> None:
    await m.pool.state()
    await until(lambda: all(replica.up for replica in m.pool.fleet.replicas))


async def test_a_call_whose_replica_dies_is_answered_by_another(machine):
    m = machine(2)
    engines = [m.start(0, version=0), m.start(1, version=0)]
    await until_ready(m)
    for engine in engines:
        engine.hold.clear()
    call = asyncio.create_task(m.pool.generate(ask("r/0")))
    await until(lambda: any(engine.served for engine in engines))
    victim, other = sorted(engines, key=lambda engine: not engine.served)
    victim.alive = False
    victim.hold.set()
    other.hold.set()
    assert (await call).id == "r/0"
    assert other.served == ["r/0"]


async def test_a_restarted_replica_gets_the_current_version_before_it_gets_requests(machine):
    m = machine(1)
    first = m.start(0)
    await m.publish(V1)
    assert (await m.pool.generate(ask("r/0"))).versions == ((1, 1),)
    first.alive = False
    second = m.start(0)
    assert (await m.pool.generate(ask("r/1"))).versions == ((1, 1),)
    assert second.calls == ["state", "prepare 1", "commit 1", "generate r/1"]


async def test_a_replica_restarted_on_the_same_port_is_noticed_by_its_live_version(machine):
    m = machine(1)
    process = m.start(0)
    await m.publish(V1)
    process.live, process.fingerprint, process.calls = -1, "", []
    assert (await m.pool.generate(ask("r/0"))).versions == ((1, 1),)
    assert process.calls == ["generate r/0", "state", "prepare 1", "commit 1", "generate r/0"]
    process.live = -1
    assert (await m.pool.state()).live_version == 1


async def test_a_call_waits_while_every_replica_is_down_and_goes_on_when_one_returns(machine):
    m = machine(2)
    call = asyncio.create_task(m.pool.generate(ask("r/0")))
    await asyncio.sleep(0)
    m.start(1, version=0)
    assert (await call).id == "r/0"


async def test_without_any_replica_the_patience_ends_in_unavailable_with_the_reason(machine):
    m = machine(1, patience_s=0.05)
    with pytest.raises(EngineUnavailable, match=r"engine-0\.json does not exist"):
        await m.pool.generate(ask("r/0"))
    m.start(0)
    with pytest.raises(EngineUnavailable, match="no engine was ready"):
        await m.pool.generate(ask("r/0"))


async def test_before_the_first_commit_replicas_are_prepared_but_get_no_requests(machine):
    m = machine(2)
    engines = [m.start(0), m.start(1)]
    call = asyncio.create_task(m.pool.generate(ask("r/0")))
    await until(lambda: all(replica.up for replica in m.pool.fleet.replicas))
    assert not call.done() and not any(engine.served for engine in engines)
    await m.publish(V1)
    await call
    assert [engine.live for engine in engines] == [1, 1]


async def test_a_replica_that_was_away_during_an_update_gets_the_newest_version_only(machine):
    m = machine(2)
    engines = [m.start(0), m.start(1)]
    await until_ready(m)
    await m.publish(V1)
    engines[1].alive = False
    await m.publish(V2)
    back = m.start(1)
    await until(lambda: m.pool.fleet.replicas[1].ready)
    assert back.calls == ["state", "prepare 2", "commit 2"]
    assert engines[0].live == 2


async def test_a_replica_that_returns_between_prepare_and_commit_is_prepared_first(machine):
    m = machine(2)
    engines = [m.start(0), m.start(1)]
    await until_ready(m)
    await m.publish(V1)
    await m.pool.prepare(V2)
    engines[1].alive = False
    await m.pool.abort(["x"])
    back = m.start(1)
    await until(lambda: m.pool.fleet.replicas[1].ready)
    assert back.live == 1
    await m.pool.commit(2)
    assert (engines[0].live, back.live) == (2, 2)


async def test_an_update_that_passes_a_replica_coming_up_still_reaches_it(machine):
    m = machine(2)
    m.start(0)
    await m.publish(V1)
    slow = m.start(1)
    gate = asyncio.Event()
    commit = slow.commit

    async def slow_commit(number: int) -> None:
        await gate.wait()
        await commit(number)

    slow.commit = slow_commit
    await until(lambda: "prepare 1" in slow.calls)
    await m.publish(V2)
    gate.set()
    await until(lambda: m.pool.fleet.replicas[1].ready)
    assert slow.live == 2


async def test_commit_is_idempotent_and_refuses_a_version_nobody_prepared(machine):
    m = machine(1)
    process = m.start(0)
    await m.publish(V1)
    await m.pool.commit(1)
    assert process.live == 1
    with pytest.raises(StateError, match=r"commit\(7\)"):
        await m.pool.commit(7)


async def test_refused_weights_are_an_error_and_keep_the_replica(machine):
    m = machine(1)
    m.start(0, version=0)
    with pytest.raises(EngineError, match="wrong fingerprint"):
        await m.pool.prepare(PolicyVersion(1, "wrong", 0, "x"))
    assert (await m.pool.generate(ask("r/0"))).versions == ((0, 1),)


async def test_a_full_replica_sends_calls_on_and_only_full_ones_raise(machine):
    m = machine(2)
    engines = [m.start(0, version=0), m.start(1, version=0)]
    await until_ready(m)
    engines[0].busy = True
    for i in range(3):
        await m.pool.generate(ask(f"r{i}/0"))
    assert len(engines[1].served) == 3
    engines[1].busy = True
    with pytest.raises(EngineBusy):
        await m.pool.generate(ask("r9/0"))
    assert all(replica.ready for replica in m.pool.fleet.replicas)


async def test_a_request_that_kills_every_engine_is_given_up(machine):
    m = machine(1)
    process = m.start(0, version=0)
    deaths = []

    async def die(request):
        deaths.append(request.id)
        raise EngineUnavailable("connection lost")

    process.generate = die
    with pytest.raises(EngineUnavailable, match="connection lost"):
        await m.pool.generate(ask("poison/0"))
    assert len(deaths) == MOST_SENDS


async def test_the_state_of_several_replicas_is_the_worst_of_them_and_the_sum_of_their_work(machine):
    m = machine(2)
    m.start(0, version=3)
    m.start(1, version=2)
    await until_ready(m)
    state = await m.pool.state()
    assert (state.live_version, state.running, state.generated_tokens, state.kv_used_frac) == (2, 4, 20, 0.1)


async def test_cancelling_a_call_leaves_the_pool_usable(machine):
    m = machine(1)
    process = m.start(0, version=0)
    process.hold.clear()
    call = asyncio.create_task(m.pool.generate(ask("r/0")))
    await until(lambda: process.served)
    call.cancel()
    await asyncio.wait([call])
    process.hold.set()
    assert (await m.pool.generate(ask("r/1"))).id == "r/1"
    assert m.pool.router.in_flight("engine-0") == 0
