"""Worlds of 2, 4 and 8 processes, each started once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from slipstream.launch.local import free_port


def start(world: int, *command: str, env: Mapping[str, str] = MappingProxyType({})) -> list[subprocess.Popen[str]]:
    """Processes that find each other, as torchrun would start them. `env`: on top of that."""
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen([sys.executable, *command], env={**common, "RANK": str(rank), **env}, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> None:
    """Wait for all; fails with what the first one that failed has written."""
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [f"rank {i}:\n{e[-4000:]}" for i, (p, e) in enumerate(zip(processes, errors, strict=True)) if p.returncode]
    assert not failed, "\n".join(failed)


class Results(dict[int, Path]):
    """Folder of the outcomes of each world, which is started when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, world: int) -> Path:
        self[world] = folder = self._factory.mktemp(f"world{world}")
        finish(start(world, "-m", "tests.dist.worker", str(folder)), timeout=1200)
        return folder


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory)
