"""A server in the test's own event loop, with a scripted engine behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import pytest

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.engine.driver import EngineDriver
from slipstream.engine.server import serving
from slipstream.serving.client import HttpEngine
from tests.unit.chat.made import write_tokenizer
from tests.unit.server.scripted import ScriptedEngine

TOKEN = "the-token"


@dataclass
class Served:
    """A running server and the ways to talk to it."""

    url: str
    engine: ScriptedEngine
    driver: EngineDriver
    http: aiohttp.ClientSession
    client: HttpEngine
    tokenizer: ChatTokenizer


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("scripted") / "scripted-model")


@pytest.fixture(scope="session")
def tokenizer(folder):
    return ChatTokenizer.load(folder)


@pytest.fixture
async def serve(folder, tokenizer):
    """`await serve(engine)`, or `await serve("text of every reply")`, which ends with the end-of-reply token."""
    async with AsyncExitStack() as stack:

        async def start(engine: ScriptedEngine | str, port: int = 0) -> Served:
            if isinstance(engine, str):
                ids = tokenizer.encode(engine + "<|im_end|>").tolist()
                engine = ScriptedEngine(lambda _: ids, seq_len=512)
            driver = EngineDriver(engine)
            url, _ = await stack.enter_async_context(serving(driver, folder, "127.0.0.1", port, TOKEN))
            http = await stack.enter_async_context(aiohttp.ClientSession(url))
            client = await stack.enter_async_context(HttpEngine(url, TOKEN))
            return Served(url, engine, driver, http, client, tokenizer)

        yield start
