"""Two trainer processes that share the experts: warm-up, RL with replay, the death of one of them, and going on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from slipstream.models.load import load_model
from slipstream.observe.metrics import read_metrics
from slipstream.trainer import checkpoint
from slipstream.transport.weights import list_versions, read_version, verify, version_folder
from tests.e2e.conftest import slipstream
from tests.waiting import HUNG_S, RUN_S, wait_until

RUN_FILE = """
[model]
path = "{model}"
seq_len = 160
[sft]
steps = 6
samples_per_step = 8
num_demonstrations = 64
optim = {{ lr = 4e-3, warmup_steps = 2 }}
[engine]
max_running = 32
kv_memory_mib = 16
[trainer]
row_tokens = 512
parallel = {{ processes = {processes}, ep = {processes} }}
[orchestrator]
batch = {{ type = "samples", samples = 16 }}
concurrency = {{ initial = 16, min = 4, max = 32 }}
filters = []
[[envs]]
id = "calculator"
group_size = 4
max_turns = 2
sampling = {{ max_tokens = 16 }}
[eval]
interval = 0
tasks = 0
[checkpoint]
interval = 2
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run file for two processes and the model that they warmed up."""
    folder = tmp_path_factory.mktemp("parallel")
    assert slipstream("make-model", folder / "raw", "--env", "calculator").returncode == 0
    for processes in (1, 2):
        (folder / f"run{processes}.toml").write_text(RUN_FILE.format(model=folder / f"warm{processes}", processes=processes))
        result = slipstream("sft", folder / f"run{processes}.toml", "--model", folder / "raw", "--out", folder / f"warm{processes}")
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("sft: wrote") == 1, "only the leading process speaks"
    return folder


def rl(folder: Path, *extra: str) -> list[str]:
    sets = ("--set", f"runs_dir={folder}", "--set", "name=r", "--set", "max_steps=8")
    return [sys.executable, "-m", "slipstream.cli", "rl", str(folder / "run2.toml"), *sets, *extra]


def trainers(supervisor: int) -> list[psutil.Process]:
    """The trainer processes of a run, the leading one first."""
    children = psutil.Process(supervisor).children()
    found = [process for process in children if " ".join(process.cmdline()).strip() == "slipstream trainer"]
    return sorted(found, key=lambda process: process.pid)


def test_two_processes_warm_up_to_the_weights_of_one(warm: Path):
    one, two = load_model(warm / "warm1"), load_model(warm / "warm2")
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3, msg=name)
    moved = [float((a - b).detach().abs().max()) for a, b in zip(load_model(warm / "raw").parameters(), two.parameters(), strict=True)]
    assert min(moved) > 4e-3


def kill_one(folder: Path, which: int, at_version: int, *extra: str, sign: signal.Signals = signal.SIGKILL, run: str = "r") -> str:
    """Kill, or stop, the leading (0) or the other (1) trainer process once that version is there. Returns what the run showed when all
    ended."""
    started = subprocess.Popen(rl(folder, *extra), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: at_version in list_versions(folder / run / "weights") or started.poll() is not None, RUN_S)
    assert started.poll() is None, started.communicate()[1][-3000:]
    processes = trainers(started.pid)
    assert len(processes) == 2
    processes[which].send_signal(sign)
    _, shown = started.communicate(timeout=HUNG_S)
    assert started.returncode == 1 and "trainer" in shown and "--resume" in shown, shown
    assert "Traceback" not in shown and not any(process.is_running() for process in processes)
    return shown


def test_a_process_that_stands_still_ends_the_run_in_time_with_one_line(warm: Path):
    shown = kill_one(warm, 1, 2, "--set", "name=still", "--set", "trainer.stall_timeout_s=20", sign=signal.SIGSTOP, run="still")
    assert "waited 20 s in vain for another one" in shown and "trainer.stall_timeout_s" in shown, shown


def test_a_run_of_two_processes_survives_the_death_of_either_and_goes_on_to_the_end(warm: Path):
    run = warm / "r"
    kill_one(warm, 1, 3)
    kill_one(warm, 0, 5, "--resume")
    log = (run / "logs" / "trainer-1.log").read_text()
    assert log.count("lost the connection to another one") == 1, log

    result = subprocess.run(rl(warm, "--resume"), capture_output=True, text=True, timeout=RUN_S, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert checkpoint.list_steps(run / "checkpoints")[-1] == 8
    assert not list((run / "checkpoints").glob(".tmp*"))
    assert sorted(file.name for file in checkpoint.step_folder(run / "checkpoints", 8).glob("shard_*")) == [
        "shard_00000.safetensors",
        "shard_00001.safetensors",
    ]
    for number in list_versions(run / "weights"):
        verify(read_version(version_folder(run / "weights", number)))
    load_model(run / "final")
    steps = {
        line["step"]: line["values"] for line in read_metrics(run) if line["kind"] == "metrics" and "trainer/loss/mean" in line["values"]
    }
    assert sorted(steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(values["trainer/replay/coverage_frac"] > 0.8 for values in steps.values())
    assert all(values["trainer/mismatch_kl/fresh"] < 1e-3 for values in steps.values() if "trainer/mismatch_kl/fresh" in values)
    assert os.path.getsize(run / "logs" / "trainer-1.log") < 10_000
