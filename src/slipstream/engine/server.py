"""The engine process: loads a model, serves it over HTTP, and says what it does.

`serve_run` is a replica of a run: it starts without a live version, writes where it listens into the run folder, and reports metrics
there. `serve_folder` stands alone: version 0 is live at once. Both end cleanly on SIGTERM and SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from aiohttp import web

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig, load
from slipstream.config.router import TOKEN_ENV
from slipstream.config.serve import EngineConfig, embedded
from slipstream.engine.app import make_app
from slipstream.engine.driver import EngineDriver
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.fit import check_engine
from slipstream.engine.handoff.roles import in_role
from slipstream.engine.metrics import report, write_once
from slipstream.errors import EngineUnavailable
from slipstream.models.impl import Impl, read_spec
from slipstream.observe.metrics import MetricsWriter
from slipstream.serving.api.http import listen
from slipstream.serving.members import write_endpoint

log = logging.getLogger(__name__)

SHUTDOWN_S = 2.0
"""Time for answers that are on their way when the process is told to stop."""


def serve_run(run_folder: Path, replica: int) -> int:
    """Serve replica `replica` of a run until SIGTERM; the exit status. Raises ConfigError or ModelError before it serves."""
    _log_to_stderr()
    run_folder = Path(run_folder)
    config = load(RunConfig, [run_folder / "config.toml"])
    model, engine = config.model, embedded(config.engine)
    check_engine(read_spec(model.path, model.impl), engine, model.seq_len, model.impl)
    port = engine.port + replica if engine.port else 0
    with made(model.path, engine, model.seq_len, config.seed + replica, -1, model.impl) as driver:
        return asyncio.run(_serve_run(driver, config, run_folder, replica, port))


def serve_folder(model_folder: Path, engine_config: EngineConfig, seq_len: int, impl: Impl = "auto") -> int:
    """Serve a model folder until SIGTERM or Ctrl-C; the exit status. Raises ConfigError or ModelError before it serves."""
    _log_to_stderr()
    check_engine(read_spec(model_folder, impl), engine_config, seq_len, impl)
    rank = int(os.environ.get("RANK", "0")) if engine_config.ep.ranks > 1 else 0
    config = engine_config.replace(port=engine_config.port + rank if engine_config.port else 0)
    with made(Path(model_folder), config, seq_len, rank, 0, impl) as driver:
        return asyncio.run(_serve_folder(driver, config, Path(model_folder)))


@contextmanager
def made(folder: Path, config: EngineConfig, seq_len: int, seed: int, version: int, impl: Impl) -> Iterator[EngineDriver]:
    """The engine of this process, alone or as one rank of several that share the experts, and its driver."""
    if config.ep.ranks == 1:
        with closing(EmbeddedEngine(folder, config, seq_len, seed, version, impl)) as engine:
            yield EngineDriver(engine)
        return
    from slipstream.engine.wide.driver import WideDriver  # an engine that is alone needs no process groups, which take long to import
    from slipstream.engine.wide.engine import WideEngine
    from slipstream.parallel.wide import joined

    with joined(config.ep) as group:
        engine = WideEngine(group, folder, config, seq_len, seed, version)
        with closing(engine):
            yield WideDriver(engine)


async def _serve_run(driver: EngineDriver, config: RunConfig, run_folder: Path, replica: int, port: int) -> int:
    token, engine = secrets.token_urlsafe(32), embedded(config.engine)
    endpoint = run_folder / "endpoints" / f"engine-{replica}.json"
    with MetricsWriter(run_folder, f"engine-{replica}") as writer, contextlib.ExitStack() as role:
        async with serving(driver, config.model.path, config.engine.host, port, token) as (url, driving):
            handoff = role.enter_context(in_role(driver, engine, run_folder, replica))
            write_endpoint(endpoint, url, token, engine.role(replica), handoff)
            log.info("engine-%d (%s) listens on %s", replica, engine.role(replica), url)
            reporting = asyncio.create_task(report(driver, writer))
            try:
                return await _stopped(driving)
            finally:
                endpoint.unlink(missing_ok=True)
                reporting.cancel()
                with contextlib.suppress(OSError):  # a full disk; `report` has said so
                    write_once(driver, writer)


async def _serve_folder(driver: EngineDriver, config: EngineConfig, folder: Path) -> int:
    token = (given := os.environ.get(TOKEN_ENV)) or secrets.token_urlsafe(32)
    async with serving(driver, folder, config.host, config.port, token) as (url, driving):
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
        print(f"serving {folder} at {url}/v1 (context {driver.engine.seq_len} tokens); stop with Ctrl-C")
        print(f"admin token: {f'that of {TOKEN_ENV}' if given else token}")
        print(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
        return await _stopped(driving)


@asynccontextmanager
async def serving(
    driver: EngineDriver, model_folder: Path, host: str, port: int, token: str
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """The server while the block runs: its URL, and the step loop, which ends only when steps fail again and again.

    Raises ConfigError when the port is taken.
    """
    tokenizer = ChatTokenizer.load(model_folder, need_template=False)
    gc.freeze()  # a full pass of the garbage collector over everything that torch brings holds all requests up for 50 ms
    app = make_app(driver, tokenizer, token, model_folder.resolve().name)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=3600, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    driving = asyncio.create_task(driver.drive())
    try:
        url = await listen(runner, host, port, "engine")
        yield url, driving
    finally:
        driver.fail(EngineUnavailable("it was told to stop"))
        await runner.cleanup()
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # its failure, if any, is the exit status already
            await driving


async def _stopped(driving: asyncio.Task[None]) -> int:
    """Waits for a signal (exit status 0) or too many failed steps (1: the reason is in the log, and everybody who waited has been told)."""
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    waiting = asyncio.create_task(signalled.wait())
    await asyncio.wait([waiting, driving], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not driving.done():
        return 0
    log.critical("the engine failed in a step and ends", exc_info=driving.exception())
    return 1


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
