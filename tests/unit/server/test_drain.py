"""Draining a real server: the admin verb, the command, and what a pool over HTTP does about it."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.config.router import RouterConfig
from slipstream.engine.server import write_endpoint
from slipstream.errors import ConfigError, RequestError
from slipstream.jobs.drain import drain
from slipstream.serving.client import HttpEngine
from slipstream.serving.members import UrlSource
from slipstream.serving.pool import EnginePool
from tests.unit.server.conftest import TOKEN
from tests.unit.serving.test_pool import ask
from tests.waiting import until


async def test_a_drained_server_gets_nothing_new_from_a_pool_and_the_verb_needs_the_token(serve):
    servers = [await serve("hello"), await serve("hello")]
    config = RouterConfig(health_interval_s=0.01, policy="round_robin", sticky=False)
    async with EnginePool(UrlSource([server.url for server in servers], TOKEN), config) as pool:
        for i in range(4):
            await pool.generate(ask(f"s{i}/0"))
        assert [len(server.engine.added) for server in servers] == [2, 2]
        await servers[0].client.drain()
        name = servers[0].url.removeprefix("http://")
        await until(lambda: pool.fleet.named(name).draining)
        for i in range(4):
            await pool.generate(ask(f"t{i}/0"))
        assert [len(server.engine.added) for server in servers] == [2, 6]
    async with HttpEngine(servers[0].url, "wrong") as stranger:
        with pytest.raises(RequestError, match="401"):
            await stranger.drain(on=False)


async def test_the_command_drains_a_replica_of_a_run_and_names_those_that_are_there(serve, tmp_path):
    served = await serve("hello")
    write_endpoint(tmp_path / "endpoints" / "engine-1.json", served.url, TOKEN)
    assert "engine-1 is drained" in await asyncio.to_thread(drain, tmp_path, "engine-1", False)
    assert served.driver.draining and (await served.client.state()).draining
    assert "takes requests again" in await asyncio.to_thread(drain, tmp_path, "engine-1", True)
    assert not served.driver.draining
    with pytest.raises(ConfigError, match=r"no replica 'engine-0'.*there: engine-1"):
        await asyncio.to_thread(drain, tmp_path, "engine-0", False)
