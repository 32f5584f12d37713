"""The adapters under test: how each is started, and what it says it offers.

A subject that lives in the test's process is made anew for each test; one with a process of its own is started once and shared.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from slipstream import __version__
from slipstream.config.serve import EngineConfig
from slipstream.engine.driver import EngineDriver
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.server import serving
from slipstream.fakes.engine import FakeEngine
from slipstream.ports import Engine
from slipstream.serving.client import HttpEngine
from tests.conformance.material import SEQ_LEN, Material

MAX_RUNNING, MAX_WAITING = 16, 16
CAPACITY = MAX_RUNNING + MAX_WAITING
EVERYTHING = frozenset({"model", "routing", "weights", "limits", "pause", "stream"})
"""model: samples from the published weights. routing: returns what its experts did. weights: reads and checks the published files.
limits: refuses what it cannot take. pause: can be held between two steps. stream: says its
tokens as it samples them."""


class Subject(Protocol):
    name: str
    offers: frozenset[str]
    version: str
    block_tokens: int
    """Tokens of a KV block: a prefix is found in whole blocks."""
    atol: float
    """Largest difference of a logprob from the reference: float32 on both sides, other kernels."""

    def engine(self) -> AsyncEngine:
        """An engine whose live version may be any."""
        ...

    def fresh(self) -> AsyncEngine:
        """An engine just started: nothing is live."""
        ...

    def close(self) -> None: ...


class AsyncEngine(Protocol):
    async def __aenter__(self) -> Engine: ...
    async def __aexit__(self, *error: object) -> None: ...


class Fake:
    """slipstream.fakes.FakeEngine: what the simulations sample from. It has versions and no model."""

    name, version, offers = "fake", __version__, frozenset[str]()
    block_tokens, atol = 1, 0.0

    def __init__(self, material: Material):
        pass

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        yield FakeEngine(random.Random(0))

    fresh = engine

    def close(self) -> None:
        pass


class Embedded:
    """The embedded engine behind its HTTP server."""

    name, version, offers = "embedded", __version__, EVERYTHING
    block_tokens, atol = 16, 1e-4

    def __init__(self, material: Material):
        self._model = material.model
        self._config = EngineConfig(max_running=MAX_RUNNING, max_waiting=MAX_WAITING, max_step_tokens=128, kv_memory_mib=32)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        driver = EngineDriver(EmbeddedEngine(self._model, self._config, SEQ_LEN, version=-1))
        async with serving(driver, self._model, "127.0.0.1", 0, "token") as (url, _), HttpEngine(url, "token") as client:
            yield client

    fresh = engine

    def close(self) -> None:
        pass
