"""The process `engine-N` of a run whose engine is vLLM: starts vLLM's server, verifies what it does, and is the engine that the pool sees.

It ends with status 1 when vLLM ends or can no longer be trusted: the supervisor starts it again, and the pool brings it to the current
version. When it ends, vLLM ends. vLLM listens on a Unix socket in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig, load
from slipstream.config.vllm import VllmConfig
from slipstream.errors import EngineError
from slipstream.models.impl import read_spec
from slipstream.observe.metrics import MetricsWriter
from slipstream.serving.api.http import check_free, listen
from slipstream.serving.members import write_endpoint
from slipstream.serving.vllm.api import Api
from slipstream.serving.vllm.app import make_app
from slipstream.serving.vllm.args import arguments
from slipstream.serving.vllm.canary import canary_prompts
from slipstream.serving.vllm.child import Server, environment, plugin_folder
from slipstream.serving.vllm.engine import Limits, VllmEngine
from slipstream.serving.vllm.published import shapes_of
from slipstream.serving.vllm.rows import RowFetcher
from slipstream.serving.vllm.scrape import values
from slipstream.serving.vllm.support import check_memory, check_python, untested
from slipstream.serving.vllm.updates import Canary

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
SHUTDOWN_S = 2.0


def serve_run(run_folder: Path, replica: int) -> int:
    """Serve replica `replica` of a run until SIGTERM; the exit status. Raises ConfigError or ModelError before it serves."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = load(RunConfig, [run_folder / "config.toml"])
    with MetricsWriter(run_folder, f"engine-{replica}") as writer:
        return asyncio.run(_serve(config, replica, run_folder / "endpoints" / f"engine-{replica}.json", writer))


async def _serve(config: RunConfig, number: int, endpoint: Path, writer: MetricsWriter) -> int:
    """Replica `number`."""
    port = config.engine.port + number if config.engine.port else 0
    await check_free(config.engine.host, port, "engine")
    token = secrets.token_urlsafe(32)
    stopped = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stopped.set)
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(stack.enter_async_context(running(config, config.seed + number)))
        await _first(starting, stopped.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        replica = starting.result()
        url = await stack.enter_async_context(_listening(replica, token, config.engine.host, port))
        write_endpoint(endpoint, url, token)
        stack.callback(endpoint.unlink, missing_ok=True)
        log.info("%s listens on %s", endpoint.stem, url)
        reporting = asyncio.create_task(_report(replica, writer))
        stack.callback(reporting.cancel)
        await _first(stopped.wait(), replica.server.ended(), _gone(replica.api), replica.engine.updates.broken.wait())
        if stopped.is_set():
            return 0
        log.critical("vLLM ended, or what it computes is unknown; this replica ends")
        return 1


class Replica:
    """A vLLM server and the engine over it."""

    def __init__(self, api: Api, server: Server, engine: VllmEngine):
        self.api, self.server, self.engine = api, server, engine

    async def metrics(self) -> dict[str, float]:
        engine = self.engine
        state = await engine.state()
        verdict = engine.updates.last_verdict
        return {
            **values(await self.api.metrics()),
            "engine/requests/running": state.running,
            "engine/requests/waiting": state.waiting,
            "engine/time/busy_s": state.busy_s,
            "engine/time/uptime_s": state.uptime_s,
            "engine/time/prepare_s": engine.updates.prepare_s,
            "engine/time/commit_s": engine.updates.commit_s,
            "engine/kv/age_max": engine.kv_age_max,
            "engine/version/live": state.live_version,
            "engine/memory/rss_mib": _resident(self.server.pid) / 2**20,
            "engine/canary/refused": engine.updates.refused,
            **({} if verdict is None else {"engine/canary/gap_nats": min(verdict.gap, 1e3)}),
        }

    async def prometheus(self) -> str:
        ours = await self.metrics()
        lines = [f"slipstream_{key.replace('/', '_')} {value}" for key, value in ours.items()]
        return await self.api.metrics() + "\n".join(lines) + "\n"


@asynccontextmanager
async def running(config: RunConfig, seed: int) -> AsyncIterator[Replica]:
    """vLLM while the block runs; nothing is live. Raises ConfigError, ModelError, EngineUnavailable: it does not start."""
    engine, model = config.engine, config.model.path
    assert isinstance(engine, VllmConfig)
    installed = check_python(engine.python)
    if (warning := untested(installed.version)) is not None:
        log.warning(warning)
    if installed.cpu:
        check_memory(engine.kv_memory_mib, psutil.virtual_memory().available >> 20)
    limits, canary = _limits(config), _canary(config)
    with tempfile.TemporaryDirectory(prefix="slipstream-vllm-") as folder:
        socket = Path(folder) / "vllm.sock"
        env = environment(plugin_folder(Path(folder) / "plugin"), engine.env, engine.capture_routing)
        argv = arguments(engine, model.resolve(), config.model.seq_len, seed, socket, installed.cpu)
        server, api = await Server.start(engine.python, argv, env), Api(socket, load_timeout_s=engine.load_timeout_s)
        try:
            await server.healthy(api, engine.start_timeout_s)
            log.info("vLLM %s serves %s", installed.version, model)
            capturing = engine.capture_routing and sum(map(sum, await api.call_workers("slipstream_capture"))) > 0
            rows = RowFetcher(api) if capturing else None
            found = VllmEngine(api, limits, shapes_of(model), engine.on_update, canary, rows)
            await found.updates.warm_up()
            yield Replica(api, server, found)
        finally:
            await api.close()
            await server.stop()


def _limits(config: RunConfig) -> Limits:
    model, engine = config.model.path, config.engine
    spec = read_spec(model, config.model.impl)
    stop_ids = frozenset(spec.eos_ids)
    if (model / "tokenizer.json").exists():
        stop_ids |= ChatTokenizer.load(model, need_template=False).eos_ids
    return Limits(config.model.seq_len, spec.vocab_size, stop_ids, engine.max_running + engine.max_waiting)


def _canary(config: RunConfig) -> Canary | None:
    engine, model = config.engine, config.model
    assert isinstance(engine, VllmConfig)
    if not engine.canary_prompts:
        log.warning("engine.canary_prompts = 0: no update is verified by what the engine computes")
        return None
    from slipstream.serving.vllm.reference import Reference  # torch

    vocab_size = read_spec(model.path, model.impl).vocab_size
    prompts = canary_prompts(engine.canary_prompts, min(engine.canary_tokens, model.seq_len - 1), vocab_size)
    return Canary(prompts, Reference(model.path, engine.dtype, model.impl), engine.tolerance)


@asynccontextmanager
async def _listening(replica: Replica, token: str, host: str, port: int) -> AsyncIterator[str]:
    """Our own server while the block runs: its URL. Raises ConfigError: it cannot listen there."""
    app = make_app(replica.engine, token, replica.prometheus)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=3600, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        yield await listen(runner, host, port, "engine")
    finally:
        await runner.cleanup()


async def _gone(api: Api) -> None:
    """Returns when vLLM will not answer any more, although its process may be there."""
    while not await api.gone():  # noqa: ASYNC110  it is another process
        await asyncio.sleep(INTERVAL_S)


async def _report(replica: Replica, writer: MetricsWriter) -> None:
    """Values once a second, and busy spans. Runs until cancelled; a full disk, or a scrape that fails, costs lines."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        try:
            found = await replica.metrics()
            writer.log(int(found["engine/version/live"]), found)
            while replica.engine.flights.spans:
                start, end = replica.engine.flights.spans.pop(0)
                writer.span("busy", start, end, step=int(found["engine/version/live"]))
        except (OSError, EngineError) as error:
            log.error("metrics are lost: %s", error)


def _resident(pid: int) -> int:
    """Bytes of a process and all below it."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


async def _first(*awaitables) -> None:
    """Wait for one of them; the others are left to go on if they are tasks, else cancelled."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, given in zip(tasks, awaitables, strict=True):
        if task is not given:
            task.cancel()
