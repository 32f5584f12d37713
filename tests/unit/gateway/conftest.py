"""A gateway in the test's own event loop, in front of a scripted engine."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import openai
import pytest

from slipstream.chat.recording import Limits
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config.gateway import GatewayConfig
from slipstream.engine.driver import EngineDriver
from slipstream.engine.local import local_engine
from slipstream.serving.gateway.app import serving
from slipstream.serving.gateway.gateway import Gateway
from slipstream.serving.gateway.session import Session
from slipstream.types import Sampling
from tests.unit.chat.made import write_tokenizer
from tests.unit.server.scripted import ScriptedEngine
from tests.waiting import HUNG_S

TOKEN = "the-token"
LIMITS = Limits(seq_len=512, turn_timeout_s=HUNG_S)


@dataclass
class Gate:
    """A running gateway and the ways to talk to it."""

    gateway: Gateway
    engine: ScriptedEngine
    driver: EngineDriver
    http: aiohttp.ClientSession
    tokenizer: ChatTokenizer
    stack: AsyncExitStack

    def open(self, name="r", salt=0, sampling: Sampling | None = None, limits: Limits = LIMITS) -> Session:
        return self.gateway.open(name, salt, sampling, limits)

    async def openai(self, session: Session | None = None, **kwargs) -> openai.AsyncOpenAI:
        where = {"base_url": f"{self.gateway.url}/v1", "api_key": TOKEN}
        if session is not None:
            where = {"base_url": session.base_url, "api_key": session.api_key}
        return await self.stack.enter_async_context(openai.AsyncOpenAI(**{**where, "max_retries": 0, **kwargs}))

    async def post(self, path: str, body: object = None, status: int = 200, key: str = TOKEN, **headers: str) -> dict:
        sent = {"Authorization": f"Bearer {key}", **headers}
        data = {"data": body} if isinstance(body, bytes | io.BytesIO) else {"json": body}
        async with self.http.post(path, headers=sent, **data) as response:
            answer = await response.json()
            assert response.status == status, answer
        return answer


Start = Callable[..., Awaitable[Gate]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return ChatTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("scripted") / "scripted-model"))


@pytest.fixture
async def start(tokenizer):
    """`await start("reply 1", "reply 2", ...)`, each ending with the end-of-reply token, in the order of the requests; or an engine."""
    async with AsyncExitStack() as stack:

        async def begin(*replies: str | Sequence[int], engine: ScriptedEngine | None = None, config: GatewayConfig | None = None) -> Gate:
            if engine is None:
                texts = iter(replies)
                engine = ScriptedEngine(lambda _: ids_of(tokenizer, next(texts)), seq_len=512)
            driver = await stack.enter_async_context(local_engine(engine))
            gateway = Gateway(driver, tokenizer, "policy", 512, TOKEN, config or GatewayConfig())
            url = await stack.enter_async_context(serving(gateway, "127.0.0.1", 0, HUNG_S))
            http = await stack.enter_async_context(aiohttp.ClientSession(url))
            return Gate(gateway, engine, driver, http, tokenizer, stack)

        yield begin


def ids_of(tokenizer: ChatTokenizer, reply: str | Sequence[int]) -> list[int]:
    return tokenizer.encode(reply + "<|im_end|>").tolist() if isinstance(reply, str) else list(reply)
