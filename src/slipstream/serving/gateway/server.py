"""`slipstream gateway`: a process of its own in front of engines that are running already, those of a run or stand-alone ones.

It leaves their weights alone: whatever version an engine has live is what answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig, load
from slipstream.config.gateway import GatewayConfig
from slipstream.config.router import TOKEN_ENV
from slipstream.errors import ConfigError
from slipstream.serving.gateway.app import serving
from slipstream.serving.gateway.gateway import Gateway
from slipstream.serving.members import UrlSource
from slipstream.serving.pool import EnginePool

LOOK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a gateway needs to know of what is behind it."""

    pool: EnginePool
    model_folder: Path
    model: str
    seq_len: int


def serve(targets: Sequence[str], model_folder: Path | None, config: GatewayConfig) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status. `targets`: one run folder, or URLs of engines, which need `model_folder`.

    Raises ConfigError or ModelError before it serves.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_serve(targets, model_folder, config))


async def _serve(targets: Sequence[str], model_folder: Path | None, config: GatewayConfig) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        served = await (_of_urls(targets, model_folder) if _are_urls(targets) else _of_run(targets))
        pool = await stack.enter_async_context(served.pool)
        token = secrets.token_urlsafe(32)
        gateway = Gateway(pool, ChatTokenizer.load(served.model_folder), served.model, served.seq_len, token, config)
        url = await stack.enter_async_context(serving(gateway, config.host, config.port, config.turn_timeout_s))
        print(f"gateway of {' '.join(targets)} at {url}/v1 (model {served.model!r}, context {served.seq_len} tokens); stop with Ctrl-C")
        print(f"token: {token}")
        print(f"an agent's base URL: {url}/sessions/NAME/v1 (OpenAI), {url}/sessions/NAME (Anthropic); its API key: the token", flush=True)
        await stopped.wait()
    return 0


def _are_urls(targets: Sequence[str]) -> bool:
    urls = [target for target in targets if target.startswith(("http://", "https://"))]
    if urls and len(urls) < len(targets):
        raise ConfigError(f"gateway: {' '.join(targets)}: give one run folder, or URLs of engines, not both")
    if not urls and len(targets) > 1:
        raise ConfigError(f"gateway: {' '.join(targets)}: a gateway serves one run")
    return bool(urls)


async def _of_run(targets: Sequence[str]) -> Served:
    folder = Path(targets[0])
    if not (folder / "config.toml").exists():
        raise ConfigError(f"{folder} is neither a URL nor a run folder: it has no config.toml")
    config = load(RunConfig, [folder / "config.toml"])
    return Served(EnginePool.of_run(folder, config.engine.replicas, config.router), config.model.path, config.name, config.model.seq_len)


async def _of_urls(urls: Sequence[str], model_folder: Path | None) -> Served:
    if model_folder is None:
        raise ConfigError("gateway: engines that are named by URL need --model FOLDER, for the tokenizer and the chat template")
    if not (token := os.environ.get(TOKEN_ENV)):
        raise ConfigError(f"gateway: set {TOKEN_ENV} to the engines' admin token, the same for all: start them with it set, too")
    seq_len = min([await _seq_len(url, token) for url in urls])
    return Served(EnginePool(UrlSource(urls, token)), model_folder, model_folder.resolve().name, seq_len)


async def _seq_len(url: str, token: str) -> int:
    """The context of the engine there. Raises ConfigError: nobody answers as one, or it has another token."""
    at, timeout = url.rstrip("/"), aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {token}"}) as http:
            async with http.get(f"{at}/admin/state") as response:
                if response.status == 401:
                    raise ConfigError(f"gateway: the engine at {url} has another admin token than {TOKEN_ENV}: start all with the same one")
            async with http.get(f"{at}/v1/models") as response:
                return int((await response.json())["data"][0]["max_model_len"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"gateway: no engine answers at {url}: {type(error).__name__}: {error}") from None
