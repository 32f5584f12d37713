"""`slipstream doctor` finds nothing wrong with the shipped run files, and finds faults that are planted in a copy of the source."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream.models.maker import PRESETS
from tests.waiting import RUN_S

REPOSITORY = Path(__file__).parents[2]
SOURCE = Path(slipstream.__file__).parent


def doctor(folder: Path, preset: str, run_file: str, *extra: str, source: Path = SOURCE) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit code, rows by check, and what was said."""
    model = folder / preset
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(dict(PRESETS[preset])))
    command = [sys.executable, "-m", "slipstream.cli", "doctor", str(REPOSITORY / "configs" / run_file), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(source.parent)}
    command += ["--set", f"model.path={model}", *extra]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return result.returncode, {row["check"]: row for row in rows}, result.stderr


@pytest.mark.parametrize(("preset", "run_file"), [("tiny-moe", "quickstart.toml"), ("tiny-dense", "smollm2.toml")])
def test_the_shipped_run_files_are_clean(tmp_path: Path, preset: str, run_file: str):
    code, rows, said = doctor(tmp_path, preset, run_file)
    assert code == 0, said
    assert not [row for row in rows.values() if row["verdict"] == "broken"]
    checked = {name for name, row in rows.items() if row["verdict"] == "ok"}
    assert {"a row a sample", "one row", "recompute", "replay off", "resume", "FSDP 2", "weight sync, twice"} <= checked
    if preset == "tiny-moe":
        assert {"EP 2", "EP 4 x CP 2", "engine = trainer: experts", "other experts"} <= checked
    else:
        assert rows["EP 2"]["verdict"] == "not possible" and "has none" in rows["EP 2"]["found"]


FAULTS = {
    "a wrong divide factor": (
        "parallel/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        2,
        "FSDP 2",
    ),
    "a shifted label at an edge between processes": (
        "parallel/rows.py",
        "return np.isin(at_N - 1, self.tokens_t)",
        "return np.isin(at_N, self.tokens_t)",
        2,
        "CP 2, all_gather",
    ),
    "a token that is dropped on its way": (
        "parallel/expert.py",
        "y_ND = y_ND * gates_TK",
        "y_ND = y_ND * (torch.arange(len(order_N)) != 3).unsqueeze(-1) * gates_TK",
        2,
        "EP 2",
    ),
    "a stale replay row": (
        "orchestrator/pack.py",
        "ids_RLK[:] = part.ids_TLK[: len(new_R)]",
        "ids_RLK[:] = np.roll(part.ids_TLK[: len(new_R)], 1, axis=0)",
        1,
        "engine = trainer: experts",
    ),
    "an expert load that is counted twice": (
        "trainer/routing.py",
        "self.load_LE[layers] += _load(ids_TLK, self._spec.num_experts)",
        "self.load_LE[layers] += 2 * _load(ids_TLK, self._spec.num_experts)",
        1,
        "one process: expert load",
    ),
    "a precision map that differs": (
        "models/fp8.py",
        "if name in columns:\n            made.append",
        'if name in columns and not name.endswith("down"):\n            made.append',
        1,
        "precision map",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str):
    file, right, wrong, processes, check = FAULTS[fault]
    copy = tmp_path / "source" / "slipstream"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / file).read_text()
    assert text.count(right) == 1, "the planted fault has to be planted anew"
    (copy / file).write_text(text.replace(right, wrong))
    code, rows, said = doctor(tmp_path, "tiny-moe", "quickstart.toml", "--processes", str(processes), source=copy)
    assert code == 1, said
    assert rows[check]["verdict"] == "broken", {name: row["found"] for name, row in rows.items() if row["verdict"] == "broken"}
