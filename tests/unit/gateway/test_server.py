"""`slipstream gateway` as a process of its own, in front of engines in this one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence

import openai
import pytest

from slipstream.config.gateway import GatewayConfig
from slipstream.errors import ConfigError
from slipstream.jobs.make_model import make
from slipstream.serving.gateway import server
from tests.unit.server.conftest import TOKEN, folder, serve, tokenizer  # noqa: F401 (fixtures)
from tests.unit.server.scripted import ScriptedEngine

ASK = [{"role": "user", "content": "Hello"}]


async def started(*args: str) -> tuple[asyncio.subprocess.Process, str, str]:
    """The process, its URL and its token."""
    argv = [sys.executable, "-m", "slipstream.cli", "gateway", *args]
    env = {**os.environ, server.TOKEN_ENV: TOKEN}
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=env)
    assert process.stdout is not None
    said = [(await process.stdout.readline()).decode() for _ in range(3)]
    url, token = re.search(r"http://[^/ ]+(?=/v1)", said[0]), re.search(r"token: (\S+)", said[1])
    assert url and token, said
    return process, url.group(), token.group(1)


async def test_it_stands_in_front_of_several_engines_and_ends_cleanly(serve, folder):  # noqa: F811
    def engine() -> ScriptedEngine:
        return ScriptedEngine(lambda _: [5, 6, 7], seq_len=300)

    engines = [await serve(engine()) for _ in range(2)]
    process, url, token = await started(*(served.url for served in engines), "--model", str(folder))
    try:
        async with openai.AsyncOpenAI(base_url=f"{url}/sessions/s/v1", api_key=token, max_retries=0) as client:
            [model] = [card async for card in client.models.list()]
            assert model.id == "scripted-model" and model.model_dump()["max_model_len"] == 300
            stream = await client.chat.completions.create(model=model.id, messages=ASK, stream=True)
            assert len([chunk async for chunk in stream]) > 2
        asks = [openai.AsyncOpenAI(base_url=f"{url}/sessions/{i}/v1", api_key=token, max_retries=0) for i in range(4)]
        await asyncio.gather(*(client.chat.completions.create(model=model.id, messages=ASK) for client in asks))
        for client in asks:
            await client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert all(served.engine.added for served in engines), "both engines are used"


@pytest.mark.parametrize(
    ("targets", "model", "part"),
    [
        (["nowhere"], None, "neither a URL nor a run folder"),
        (["a", "b"], None, "serves one run"),
        (["http://127.0.0.1:1", "runs/x"], None, "not both"),
        (["http://127.0.0.1:1"], None, "--model"),
        (["http://127.0.0.1:1"], "folder", "no engine answers at"),
    ],
)
def test_what_is_wrong_with_its_targets_is_said_before_it_serves(targets: Sequence[str], model, part, folder, monkeypatch):  # noqa: F811
    monkeypatch.setenv(server.TOKEN_ENV, TOKEN)
    with pytest.raises(ConfigError, match=part):
        server.serve(targets, folder if model else None, GatewayConfig())


async def test_another_token_than_the_engines_is_said_before_it_serves(serve, folder, monkeypatch):  # noqa: F811
    served = await serve(ScriptedEngine(lambda _: [5], seq_len=300))
    monkeypatch.setenv(server.TOKEN_ENV, "another")
    with pytest.raises(ConfigError, match=f"the engine at {served.url} has another admin token"):
        await server._of_urls([served.url], folder)
    monkeypatch.setenv(server.TOKEN_ENV, TOKEN)
    assert (await server._of_urls([served.url + "/"], folder)).seq_len == 300


async def test_engines_that_stand_alone_take_the_token_that_the_gateway_takes(tmp_path):
    make(tmp_path / "model", "tiny-moe", ["calculator"], seed=0)
    argv = [sys.executable, "-m", "slipstream.cli", "engine", "--model", str(tmp_path / "model"), "--seq-len", "128"]
    env = {**os.environ, server.TOKEN_ENV: "one for all of them"}
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=env)
    assert process.stdout is not None
    try:
        said = [(await process.stdout.readline()).decode() for _ in range(3)]
        url = re.search(r"http://[^/ ]+(?=/v1)", said[0])
        assert url and said[1] == f"admin token: that of {server.TOKEN_ENV}\n" and "one for all" not in "".join(said)
        assert await server._seq_len(url.group(), "one for all of them") == 128
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def test_engines_by_url_need_a_token(folder, monkeypatch):  # noqa: F811
    monkeypatch.delenv(server.TOKEN_ENV, raising=False)
    with pytest.raises(ConfigError, match=server.TOKEN_ENV):
        server.serve(["http://127.0.0.1:1"], folder, GatewayConfig())
