"""Pools over fake replicas run on virtual time: pauses cost nothing, and how fast the machine is cannot matter."""

import asyncio

from tests.sim.clock import VirtualLoop

VIRTUAL = {"test_pool", "test_pool_faults", "test_disaggregate"}


def pytest_asyncio_loop_factories(config, item):
    return {"clock": VirtualLoop if item.module.__name__.rpartition(".")[2] in VIRTUAL else asyncio.new_event_loop}
