"""A run of seconds on a model that has not learned anything: for tests of what happens around the training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import RUN_S

RUN_FILE = """
[model]
path = "{model}"
seq_len = 96
[engine]
kv_memory_mib = 8
[trainer]
row_tokens = 256
[orchestrator]
batch = {{ type = "samples", samples = 16 }}
concurrency = {{ initial = 16, min = 4, max = 16 }}
filters = []
[[envs]]
id = "reverse-text"
group_size = 4
sampling = {{ max_tokens = 16 }}
[eval]
tasks = 0
[checkpoint]
interval = 2
"""


@dataclass
class Small:
    """A run file and the folder of the run that it makes."""

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "r"

    def command(self, *extra: str) -> list[str]:
        sets = ("--set", "name=r", "--set", f"runs_dir={self.folder}")
        return [sys.executable, "-m", "slipstream.cli", "rl", str(self.folder / "run.toml"), *sets, *extra]

    def rl(self, *extra: str, timeout: float = RUN_S) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self.env}
        return subprocess.run(self.command(*extra), env=env, capture_output=True, text=True, timeout=timeout, check=False)


def small(folder: Path, model: Path) -> Small:
    (folder / "run.toml").write_text(RUN_FILE.format(model=model))
    return Small(folder)
