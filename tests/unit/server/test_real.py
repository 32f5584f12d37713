"""The server with the embedded engine and a real, tiny model: in this process, and as the process that a run starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import openai
import pytest

from slipstream.config import RunConfig, to_toml, validate
from slipstream.config.router import RouterConfig
from slipstream.config.serve import EngineConfig
from slipstream.engine.driver import EngineDriver
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.local import local_engine
from slipstream.engine.server import serving
from slipstream.errors import EngineError
from slipstream.models.maker import make_model
from slipstream.observe.metrics import FILE
from slipstream.serving.client import HttpEngine
from slipstream.serving.pool import EnginePool
from slipstream.serving.resume import Resumable
from slipstream.transport.weights import fingerprint_file
from slipstream.types import GenerateRequest, PolicyVersion, Sampling, TokenPiece
from tests.waiting import HUNG_S, until

CONFIG = EngineConfig(kv_memory_mib=8, max_running=64)
SEQ_LEN = 256
ASK = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "tiny"
    make_model(folder, "tiny-moe", ["the quick brown fox jumps over the lazy dog", "a calculator adds numbers"] * 3, vocab_size=400)
    return folder


@pytest.fixture(scope="module")
def weights(folder):
    return PolicyVersion(1, fingerprint_file(folder / "model.safetensors")[0], 0, str(folder))


def ask(name: str, seed: int = 0, **sampling) -> GenerateRequest:
    return GenerateRequest(name, np.array([70, 71, 72], np.int32), Sampling(seed=seed, **sampling))


LONG = GenerateRequest("a/0", np.array([70, 71, 72], np.int32), Sampling(seed=0, max_tokens=250))


async def test_64_requests_over_http_get_what_the_engine_gives_alone(folder):
    alone = EmbeddedEngine(folder, CONFIG, SEQ_LEN)
    expected = {}
    for seed in range(64):
        alone.add(ask(f"r{seed}/0", seed, max_tokens=4))
        while alone.has_work:
            expected |= {completion.id: completion.tokens_N.tolist() for completion in alone.step().finished}
    async with (
        serving(EngineDriver(EmbeddedEngine(folder, CONFIG, SEQ_LEN)), folder, "127.0.0.1", 0, "t") as (url, _),
        HttpEngine(url) as client,
    ):
        answers = await asyncio.gather(*(client.generate(ask(f"r{seed}/0", seed, max_tokens=4)) for seed in range(64)))
    assert {answer.id: answer.tokens_N.tolist() for answer in answers} == expected


async def test_the_openai_package_chats_with_a_real_model_streamed_as_in_one_piece(folder):
    engine = EmbeddedEngine(folder, CONFIG, SEQ_LEN)
    async with AsyncExitStack() as stack:
        url, _ = await stack.enter_async_context(serving(EngineDriver(engine), folder, "127.0.0.1", 0, "t"))
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))
        whole = await client.chat.completions.create(model="tiny", messages=ASK, max_tokens=24, seed=3)
        stream = await client.chat.completions.create(model="tiny", messages=ASK, max_tokens=24, seed=3, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        again = await client.chat.completions.create(model="tiny", messages=ASK * 9, max_tokens=2)
        again = await client.chat.completions.create(model="tiny", messages=ASK * 9, max_tokens=2)
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 24
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    engine.check_integrity()


async def test_weights_swap_while_requests_run_and_wrong_ones_are_refused(folder, weights):
    engine = EmbeddedEngine(folder, CONFIG, SEQ_LEN)
    async with serving(EngineDriver(engine), folder, "127.0.0.1", 0, "t") as (url, _), HttpEngine(url, "t") as client:
        call = asyncio.create_task(client.generate(ask("long/0", max_tokens=200)))
        await client.prepare(weights)
        with pytest.raises(EngineError, match="cannot be prepared"):
            await client.prepare(PolicyVersion(2, "0" * 32, 1, weights.path))
        await client.commit(1)
        completion = await call
        assert (await client.state()).live_version == 1
    assert sum(count for _, count in completion.versions) == len(completion.tokens_N)


async def test_a_completion_that_another_engine_ends_is_the_one_that_one_engine_gives(folder):
    request = ask("r/0", seed=0, max_tokens=40)
    engines = [EmbeddedEngine(folder, CONFIG, SEQ_LEN) for _ in range(2)]
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(local_engine(engine)) for engine in engines]
        whole = await ports[0].generate(request)
        begun = Resumable(request, lambda piece: leaving.cancel() if begun.num_heard == 17 else None)
        leaving = asyncio.create_task(ports[0].stream(begun.request, begun.hear))
        await asyncio.wait([leaving])
        before = begun.num_pieces
        ended = begun.whole(await ports[1].stream(begun.request, begun.hear), before)
    assert before >= 17 and len(ended.tokens_N) == len(whole.tokens_N) == 40
    assert ended.tokens_N.tolist() == whole.tokens_N.tolist()
    np.testing.assert_allclose(ended.logprobs_N, whole.logprobs_N, atol=1e-4)
    assert ended.versions == whole.versions and ended.finish_reason == whole.finish_reason
    assert ended.routing is not None and whole.routing is not None
    assert ended.routing.start == whole.routing.start == 0 and ended.routing.valid_T.all()
    assert np.array_equal(ended.routing.ids_TLK, whole.routing.ids_TLK)


def start(run_folder, replica: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "slipstream.cli", "engine", "--run", str(run_folder), "--replica", str(replica)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_of(folder, run_folder, replicas: int) -> None:
    """A run folder for engines alone."""
    section = {**CONFIG.model_dump(), "replicas": replicas}
    config = validate(RunConfig, {"model": {"path": str(folder), "seq_len": SEQ_LEN}, "envs": [{"id": "reverse-text"}], "engine": section})
    (run_folder / "config.toml").write_text(to_toml(config))


@pytest.mark.slow
async def test_a_stream_whose_engine_is_killed_goes_on_elsewhere_with_the_same_tokens(folder, weights, tmp_path):
    run_of(folder, tmp_path, replicas=2)
    processes = [start(tmp_path, i) for i in range(2)]
    try:
        async with EnginePool.of_run(tmp_path, 2, RouterConfig(patience_s=HUNG_S)) as pool:
            await pool.prepare(weights)
            await pool.commit(1)
            await until(lambda: len(list((tmp_path / "endpoints").iterdir())) == 2)
            await pool.commit(1)
            heard: list[int] = []
            killed: list[int] = []

            def hear(piece: TokenPiece) -> None:
                heard.extend(piece.tokens_N.tolist())
                if len(heard) >= 5 and not killed:
                    killed.append(pool.router.in_flight("engine-1"))
                    processes[killed[0]].kill()

            streamed = await pool.stream(LONG, hear)
            whole = await pool.generate(replace(LONG, id="b/0"))
        assert streamed.tokens_N.tolist() == whole.tokens_N.tolist() and heard == whole.tokens_N.tolist()[: len(heard)]
        assert pool.retries == 1 and sum(process.poll() is not None for process in processes) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
async def test_a_killed_engine_process_comes_back_and_the_pool_goes_on_with_the_current_version(folder, weights, tmp_path):
    run_of(folder, tmp_path, replicas=1)
    process = start(tmp_path)
    try:
        async with EnginePool.of_run(tmp_path, 1, RouterConfig(patience_s=HUNG_S)) as pool:
            await pool.prepare(weights)
            await pool.commit(1)
            assert (await pool.generate(ask("a/0", max_tokens=2))).versions == ((1, 2),)
            call = asyncio.create_task(pool.generate(ask("a/1", max_tokens=200)))
            await asyncio.sleep(0.05)
            process.kill()
            process.wait()
            process = start(tmp_path)
            completion = await call
            assert {version for version, _ in completion.versions} == {1}
            assert (await pool.generate(ask("a/2", max_tokens=2))).versions == ((1, 2),), "by the new process, also if the old one was fast"
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, HUNG_S) == 0
    finally:
        process.kill()
        process.wait()
    assert not list((tmp_path / "endpoints").iterdir())
    lines = (tmp_path / FILE).read_text()
    assert '"engine/tokens/generated"' in lines and '"busy"' in lines
