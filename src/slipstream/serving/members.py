"""Where replicas are found: the endpoint files of a run, or addresses of engines that somebody else runs.

A source knows names and how to locate each; whether anybody answers there is the pool's business.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from yarl import URL

from slipstream.config.disaggregation import Role
from slipstream.config.router import RouterConfig
from slipstream.errors import ConfigError, EngineUnavailable
from slipstream.transport.files import write_private


class Endpoint(msgspec.Struct, frozen=True):
    """endpoints/engine-N.json of a run folder."""

    url: str
    token: str
    pid: int = 0
    role: str = "mixed"
    """prefill: it gets no requests, only handoffs; decode or mixed: it does."""
    handoff: str = ""
    """Where a prefill engine hands blocks over."""


Locate = Callable[[], Endpoint]
"""Where a replica listens now. Raises EngineUnavailable when that is not known (any more)."""


class Source(Protocol):
    """Who belongs to the pool."""

    expected: Mapping[str, Locate]
    """Members from the beginning, whether they are there yet or not."""

    async def find(self) -> Mapping[str, Locate]:
        """All members now. Raises EngineUnavailable when that cannot be told; then nobody comes or goes."""
        ...


class FolderSource:
    """endpoints/*.json of a run. Those of the run itself always belong to it; a further file is a replica while it is there."""

    def __init__(self, folder: Path, replicas: int):
        self._folder = Path(folder)
        self.expected: Mapping[str, Locate] = {
            f"engine-{i}": partial(read_endpoint, self._folder / f"engine-{i}.json") for i in range(replicas)
        }

    async def find(self) -> Mapping[str, Locate]:
        extra = {file.stem: partial(read_endpoint, file) for file in sorted(self._folder.glob("*.json"))}
        return {**extra, **self.expected}


class UrlSource:
    """A fixed list of engines."""

    def __init__(self, urls: Sequence[str], token: str):
        self.expected: Mapping[str, Locate] = {_name(url): partial(Endpoint, url, token) for url in urls}

    async def find(self) -> Mapping[str, Locate]:
        return self.expected


class DnsSource:
    """As many engines as the host names of `urls` have addresses. A name that resolves to nothing for a moment removes nobody."""

    def __init__(self, urls: Sequence[str], token: str):
        self.expected: Mapping[str, Locate] = {}
        self._urls, self._token = [URL(url) for url in urls], token

    async def find(self) -> Mapping[str, Locate]:
        loop, found = asyncio.get_running_loop(), {}
        for url in self._urls:
            try:
                answers = await loop.getaddrinfo(url.host or "", url.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise EngineUnavailable(f"router.urls: {url.host!r} does not resolve: {error}") from None
            for address in sorted({str(answer[4][0]) for answer in answers}):
                at = str(url.with_host(address)).rstrip("/")
                found[_name(at)] = partial(Endpoint, at, self._token)
        return found


def source_of(config: RouterConfig, run_folder: Path, replicas: int) -> Source:
    """What the configuration says. Raises ConfigError when engines of somebody else need a token and there is none."""
    if not config.urls:
        return FolderSource(run_folder / "endpoints", replicas)
    token = os.environ.get(config.token_env, "")
    if not token:
        raise ConfigError(
            f"router.urls names running engines, and the environment variable {config.token_env} (router.token_env) with their admin token "
            "is not set: export it; a stand-alone engine prints its token at its start"
        )
    return (DnsSource if config.resolve else UrlSource)(config.urls, token)


def _name(url: str) -> str:
    """Host and port: it becomes part of metric keys, which have no slash in a name."""
    return url.partition("://")[2].replace("/", "_")


def read_endpoint(file: Path) -> Endpoint:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Endpoint)
    except FileNotFoundError:
        raise EngineUnavailable(f"{file} does not exist: the engine has not started yet, or has ended") from None
    except (msgspec.DecodeError, OSError) as error:
        raise EngineUnavailable(f"{file} cannot be read: {error}") from None


def write_endpoint(file: Path, url: str, token: str, role: Role = "mixed", handoff: str = "") -> None:
    """Where a replica listens, for the other roles of the run: readable by its user only, never half-written."""
    values = {"url": url, "token": token, "pid": os.getpid(), "role": role, "handoff": handoff}
    write_private(file, json.dumps(values)).replace(file)
