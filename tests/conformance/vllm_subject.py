"""vLLM behind its adapter: the process `engine-0` of a run, as `slipstream rl` starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from slipstream.config import RunConfig, to_toml, validate
from slipstream.ports import Engine
from slipstream.serving.client import HttpEngine
from slipstream.serving.members import Endpoint
from slipstream.serving.vllm.support import check_python
from tests.conformance.material import SEQ_LEN, Material
from tests.conformance.subjects import EVERYTHING

START_S = 600.0
"""engine.start_timeout_s: half a minute on a quiet machine."""


class VllmProcess:
    """One replica process, started when it is made."""

    def __init__(self, folder: Path, model: Path, python: Path, **engine):
        values = {"type": "vllm", "python": str(python), "dtype": "float32", "max_running": 16, "max_waiting": 16, "max_step_tokens": 256}
        engine = {**values, "kv_memory_mib": 64, **engine}
        run = {"model": {"path": str(model), "seq_len": SEQ_LEN}, "engine": engine, "envs": [{"id": "reverse-text"}]}
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(to_toml(validate(RunConfig, run)))
        self.log = folder / "engine.log"
        self._endpoint = folder / "endpoints" / "engine-0.json"
        command = [sys.executable, "-m", "slipstream.cli", "engine", "--run", str(folder), "--replica", "0"]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def client(self) -> HttpEngine:
        """Waits for the endpoint."""
        deadline = time.monotonic() + START_S
        while not self._endpoint.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        endpoint = msgspec.json.decode(self._endpoint.read_bytes(), type=Endpoint)
        return HttpEngine(endpoint.url, endpoint.token)

    def below(self) -> list[psutil.Process]:
        """vLLM's processes."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def ended(self) -> int:
        """Waits for its exit code."""
        return self._process.wait(60)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


class Vllm:
    """The kit shares one process; a case that wants a fresh one gets its own."""

    name, version = "vllm", ""
    offers = EVERYTHING
    block_tokens, atol = 128, 5e-4

    def __init__(self, material: Material, python: Path, folder: Path):
        type(self).version = check_python(python).version
        self._material, self._python, self._folder, self._count = material, python, folder, 0
        self._shared: VllmProcess | None = None

    def _start(self) -> VllmProcess:
        self._count += 1
        return VllmProcess(self._folder / str(self._count), self._material.model, self._python)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        self._shared = self._shared or self._start()
        async with self._shared.client() as client:
            yield client

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Engine]:
        process = self._start()
        try:
            async with process.client() as client:
                yield client
        finally:
            process.close()

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
