"""A damaged newest checkpoint: `--resume` names it and the way back, and goes back only once the user has taken it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.small import Small, small

pytestmark = pytest.mark.slow


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


DAMAGES = [
    ("shard_00000.safetensors", flip, r"has hash \w{32}, the manifest says \w{32}: the file is damaged \(tensor [\w/.]+\)"),
    ("shard_00000.safetensors", shorten, r"has \d+ bytes, the manifest says \d+: truncated .* before tensor [\w/.]+"),
    ("manifest.json", shorten, "does not decode, it is truncated"),
    ("state.json", Path.unlink, "is missing"),
]


def versions(run: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in run.glob("weights/v*/version.json")}


def test_resume_from_a_damaged_checkpoint(tmp_path: Path, raw_model: Path):
    job: Small = small(tmp_path, raw_model)
    first = job.rl("--set", "max_steps=4")
    assert first.returncode == 0, first.stderr
    newest, before = job.run / "checkpoints" / "step_000004", versions(job.run)
    shutil.copytree(newest, tmp_path / "whole")
    for name, damage, reason in DAMAGES:
        damage(newest / name)
        refused = job.rl("--resume", "--set", "max_steps=5")
        assert refused.returncode == 1
        assert re.search(rf"{newest / name} {reason}", refused.stderr), refused.stderr
        assert f"step 2 is whole. To go back to it, delete what is newer (rm -r {newest})" in refused.stderr
        shutil.rmtree(newest)
        if name != DAMAGES[-1][0]:
            shutil.copytree(tmp_path / "whole", newest)
    back = job.rl("--resume", "--set", "max_steps=5")  # the damaged one is deleted: from step 2
    assert back.returncode == 0, back.stderr
    after = versions(job.run)
    assert "v000005" in after and after["v000004"] == before["v000004"]
