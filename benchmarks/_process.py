"""A program under measurement in a process of its own, which answers one JSON line for each that it is sent. It may live in another
virtual environment, and several of them can take turns."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class PeerError(Exception):
    """A process ended or answered nonsense; the message is the reason."""


class Process:
    """`python -m MODULE ...` from the root of the repository, with one OpenMP thread."""

    def __init__(self, name: str, python: str | Path, module: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Returns when the program has said its first line (`about`). Raises PeerError."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
        self._process = subprocess.Popen(
            [str(python), "-m", *module],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.about = self._answer()

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line, wait for the answer. Raises PeerError."""
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._log.seek(0)
        tail = " | ".join(self._log.read().strip().splitlines()[-3:])
        raise PeerError(f"{self.name} ended with exit code {code}: {tail}")
