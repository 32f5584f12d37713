"""A warmed-up tiny MoE and a run file that trains it in seconds: what the end-to-end tests share."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import RUN_S

RUN_FILE = """
max_steps = 30
[model]
path = "{model}"
seq_len = 192
[sft]
steps = 160
samples_per_step = 24
num_demonstrations = 2048
noise = 0.65
optim = {{ lr = 4e-3, warmup_steps = 5 }}
[engine]
max_running = 64
kv_memory_mib = 16
[trainer]
row_tokens = 1024
optim = {{ lr = 4e-4 }}
[orchestrator]
batch = {{ type = "samples", samples = 64 }}
concurrency = {{ initial = 64, min = 16, max = 128 }}
[[envs]]
id = "calculator"
args = {{ mistakes = ["early"], max_operand = 9, num_train = 1500, num_eval = 128 }}
group_size = 8
max_turns = 5
sampling = {{ max_tokens = 32 }}
[eval]
interval = 0
tasks = 64
[checkpoint]
interval = 4
"""


def slipstream(*args: str | Path, timeout: float = RUN_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@dataclass
class Job:
    """A run file and where its runs go."""

    config: Path
    runs: Path

    def command(self, name: str, *extra: str) -> list[str]:
        """`slipstream rl` for the run of this name."""
        sets = [f"name={name}", f"runs_dir={self.runs}"]
        return [sys.executable, "-m", "slipstream.cli", "rl", str(self.config), *(x for s in sets for x in ("--set", s)), *extra]

    def rl(self, name: str, *extra: str, timeout: float = RUN_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(name, *extra), capture_output=True, text=True, timeout=timeout, check=False)

    def summary(self, name: str) -> dict:
        result = slipstream("summary", self.runs / name, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def trained(self, name: str) -> Sequence[tuple[str, int]]:
        """(rollout, step) of every trained rollout, from the ledger."""
        with sqlite3.connect(self.runs / name / "ledger.sqlite") as ledger:
            return ledger.execute("SELECT id, step FROM rollouts WHERE status = 'trained'").fetchall()


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("e2e")
    made = slipstream("make-model", folder / "raw", "--env", "calculator")
    assert made.returncode == 0, made.stderr
    config = folder / "run.toml"
    config.write_text(RUN_FILE.format(model=folder / "warm"))
    warmed = slipstream("sft", config, "--model", folder / "raw", "--out", folder / "warm")
    assert warmed.returncode == 0, warmed.stderr
    return Job(config, folder / "runs")


@pytest.fixture(scope="session")
def raw_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE that has learned nothing."""
    folder = tmp_path_factory.mktemp("raw") / "model"
    made = slipstream("make-model", folder, "--env", "reverse-text")
    assert made.returncode == 0, made.stderr
    return folder
