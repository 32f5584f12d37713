"""The disk of the run fills up in the middle: one line says so, the last checkpoint is whole, and with room again the run goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.observe.summary import summarise
from slipstream.trainer import checkpoint
from tests.e2e.small import small
from tests.waiting import RUN_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for the most that the run holds at one time: three checkpoints of 10 MiB, a few weight versions
    of 3.4 MiB, deleted ones that an engine still reads, the ledger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Take all that is left, to the last byte."""
    with open(disk / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
    with open(disk / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"0")


@pytest.mark.parametrize("leave", [0, 300_000], ids=["nothing left", "a little left"])
def test_a_disk_that_fills_up_costs_time_only(disk: Path, raw_model: Path, leave: int):
    job = small(disk, raw_model)
    process = subprocess.Popen(job.command("--set", "max_steps=3000"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (job.run / "checkpoints" / "step_000004").exists() or process.poll() is not None, RUN_S)
    assert process.poll() is None
    reserve = disk / "reserve"
    reserve.write_bytes(bytes(leave))
    fill(disk)
    reserve.unlink()
    _, shown = process.communicate(timeout=RUN_S)
    assert process.returncode == 1
    assert "No space left on device" in shown or "is full" in shown, shown
    assert "Traceback" not in shown and "--resume" in shown, shown
    last = checkpoint.newest(job.run / "checkpoints")
    assert last is not None and last.step >= 4

    refused = job.rl("--resume", "--set", "max_steps=3000")
    assert refused.returncode in (1, 3) and "Traceback" not in refused.stderr, refused.stderr

    os.unlink(disk / "filler")
    stop = last.step + 60
    resumed = job.rl("--resume", "--set", f"max_steps={stop}")
    assert resumed.returncode == 0, resumed.stderr
    summary = summarise(job.run)
    assert summary["ledger_balanced"] is True and summary["steps"] == stop
