"""Checkpoints of the whole run: checkpoints/step_000010/{manifest.json, model.safetensors, optimizer.safetensors, state.json}.

One manifest stands for all of it: size and hash of every file, the step, the configuration's fingerprint, and what the orchestrator
was when it cut the batch of that step (cursor, curriculum, ledger position). A checkpoint appears by one rename, so a crash leaves the
previous one; it is verified before anything older is removed, and again when it is loaded. No pickle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.transport.files import fsync_file, fsync_folder, write_durably

SCHEMA = 1
MANIFEST, MODEL, OPTIMIZER, STATE = "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    step: int
    folder: Path
    config_fingerprint: str
    orchestrator_state: Mapping[str, Any]
    state: Mapping[str, Any]
    """The trainer's own plain values: RNG, schedule position, consecutive bad steps."""

    def model_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / MODEL)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / OPTIMIZER)


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:06d}"


def list_steps(checkpoints: Path) -> list[int]:
    """Steps with a checkpoint folder, ascending; whether it is whole is for `read` to say."""
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*") if path.name[5:].isdigit())


def save(
    checkpoints: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    orchestrator_state: Mapping[str, Any],
    config_fingerprint: str,
) -> Checkpoint:
    """Write, commit by rename, read back and verify. Replaces a checkpoint of the same step.

    Raises OSError (a full disk among others): nothing of the attempt is left, older checkpoints are as they were.
    """
    temp, final = checkpoints / f".tmp-step_{step:06d}", step_folder(checkpoints, step)
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
            write_tensors(temp / name, tensors)
            fsync_file(temp / name)
        write_durably(temp / STATE, json.dumps(dict(state)).encode())
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "config_fingerprint": config_fingerprint,
            "orchestrator_state": dict(orchestrator_state),
            "files": {name: _describe(temp / name) for name in (MODEL, OPTIMIZER, STATE)},
        }
        write_durably(temp / MANIFEST, json.dumps({**manifest, "xxh3": _digest(manifest)}).encode())
        _commit(temp, final)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return read(final)


def read(folder: Path) -> Checkpoint:
    """Check every file of a checkpoint against its manifest. Raises ModelError naming the file that is missing or damaged."""
    manifest = _read_json(folder / MANIFEST)
    expected, found = manifest.pop("xxh3", None), _digest(manifest)
    if found != expected:
        raise ModelError(f"{folder / MANIFEST} has hash {found}, it says {expected} itself: the file is damaged")
    if manifest["schema"] != SCHEMA:
        raise ModelError(f"{folder / MANIFEST} has schema {manifest['schema']}; this build reads {SCHEMA}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.exists():
            raise ModelError(f"{path} is missing from the checkpoint")
        found = _describe(path)
        if found["bytes"] != expected["bytes"]:
            raise ModelError(
                f"{path} has {found['bytes']} bytes, the manifest says {expected['bytes']}: truncated or not of this checkpoint"
            )
        if found["xxh3"] != expected["xxh3"]:
            raise ModelError(f"{path} has hash {found['xxh3']}, the manifest says {expected['xxh3']}: the file is damaged")
    return Checkpoint(manifest["step"], folder, manifest["config_fingerprint"], manifest["orchestrator_state"], _read_json(folder / STATE))


def newest(checkpoints: Path) -> Checkpoint | None:
    """The newest checkpoint, verified; None when there has never been one.

    Raises ModelError when it is damaged, saying how to go back to the one before: that is the user's decision.
    """
    steps = list_steps(checkpoints)
    if not steps:
        return None
    try:
        return read(step_folder(checkpoints, steps[-1]))
    except ModelError as error:
        raise ModelError(f"{error}. {_way_back(checkpoints, steps)}") from None


def _way_back(checkpoints: Path, steps: list[int]) -> str:
    """What the user can do when the last of `steps` is damaged."""
    for step in reversed(steps[:-1]):
        with contextlib.suppress(ModelError):
            read(step_folder(checkpoints, step))
            remove = " ".join(str(step_folder(checkpoints, s)) for s in steps if s > step)
            return (
                f"The checkpoint of step {step} is whole. To go back to it, delete what is newer (rm -r {remove}) and start again with "
                "--resume: the batches since then are still there and are trained again"
            )
    return "No other checkpoint is whole: restore the file, or start afresh with --clean"


def prune(checkpoints: Path, keep_last: int) -> int:
    """Remove all but the newest `keep_last`; returns the step of the oldest that is left. Call it after the newest was verified."""
    steps = list_steps(checkpoints)
    for step in steps[:-keep_last]:
        shutil.rmtree(step_folder(checkpoints, step))
    return steps[-keep_last:][0]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Not yet synced. safetensors reports failed writes as its own error, with the errno in the text: turned back into OSError."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from None


def _commit(temp: Path, final: Path) -> None:
    """The rename that makes the checkpoint exist. An older one of the same step steps aside first."""
    aside = final.with_name(f".old-{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.rename(final, aside)
    os.rename(temp, final)
    fsync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def _digest(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the folder is not a whole checkpoint") from None
    except ValueError as error:
        raise ModelError(f"{path} does not decode, it is truncated or damaged: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} does not hold a JSON object: the file is damaged")
    return values
