"""Checkpoints of the whole run: checkpoints/step_000010/{manifest.json, state.json, shard_00000.safetensors, ...}.

One manifest stands for all of it: size and hash of every file and tensor, the step, the configuration's fingerprint, and what the
orchestrator was when it cut the batch of that step (cursor, curriculum, ledger position). Every process of the trainer writes one shard
(`trainer.shards`) into a folder that nobody looks at; `commit` makes a checkpoint of it by one rename, so a crash leaves the previous one.
What was written has been read back before anything older is removed, and is verified again when it is loaded. No pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from slipstream.errors import ModelError
from slipstream.models.tensor_file import cut_off
from slipstream.trainer.shards import Stored, describe, where_damaged
from slipstream.transport.files import fsync_folder, write_durably

SCHEMA = 2
MANIFEST, STATE = "manifest.json", "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    step: int
    folder: Path
    config_fingerprint: str
    orchestrator_state: Mapping[str, Any]
    state: Mapping[str, Any]
    """The trainer's own plain values: RNG, schedule position, consecutive bad steps, family of the model."""

    def tensors(self) -> Stored:
        return Stored(self.folder)


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:06d}"


def list_steps(checkpoints: Path) -> list[int]:
    """Steps with a checkpoint folder, ascending; whether it is whole is for `read` to say."""
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*") if path.name[5:].isdigit())


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder for the shards of a new checkpoint. Whatever earlier attempts left is removed."""
    for left in checkpoints.glob(".tmp-step_*"):
        shutil.rmtree(left)
    temp = checkpoints / f".tmp-step_{step:06d}"
    temp.mkdir(parents=True)
    return temp


def commit(
    temp: Path,
    step: int,
    shards: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
    orchestrator_state: Mapping[str, Any],
    config_fingerprint: str,
) -> Checkpoint:
    """Make a checkpoint of a folder in which the files `shards` have been written. Replaces a checkpoint of the same step.

    `shards`: file to its entry, as `shards.write_shard` returns it. Raises OSError; the folder is then for `discard`.
    """
    final = step_folder(temp.parent, step)
    write_durably(temp / STATE, json.dumps(dict(state)).encode())
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "config_fingerprint": config_fingerprint,
        "orchestrator_state": dict(orchestrator_state),
        "files": {**{name: dict(entry) for name, entry in sorted(shards.items())}, STATE: describe(temp / STATE)},
    }
    write_durably(temp / MANIFEST, json.dumps({**manifest, "xxh3": _digest(manifest)}).encode())
    _put(temp, final)
    return read(final, hashes=False)


def discard(temp: Path) -> None:
    """Nothing of an attempt is left."""
    shutil.rmtree(temp, ignore_errors=True)


def read(folder: Path, hashes: bool = True) -> Checkpoint:
    """Check every file of a checkpoint against its manifest. Raises ModelError naming the file, and the tensor, that is missing or damaged.

    `hashes` False: of files that have just been read back only the sizes.
    """
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
        size = path.stat().st_size
        if size != expected["bytes"]:
            lost = f"; it ends within or before tensor {cut_off(path)[0]}" if cut_off(path) else ""
            raise ModelError(f"{path} has {size} bytes, the manifest says {expected['bytes']}: truncated or not of this checkpoint{lost}")
        found = describe(path)["xxh3"] if hashes else expected["xxh3"]
        if found != expected["xxh3"]:
            where = where_damaged(path, expected["tensors"]) if "tensors" in expected else ""
            raise ModelError(f"{path} has hash {found}, the manifest says {expected['xxh3']}: the file is damaged{where}")
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


def _put(temp: Path, final: Path) -> None:
    """The rename that makes the checkpoint exist. An older one of the same step steps aside first."""
    aside = final.with_name(f".old-{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.rename(final, aside)
    os.rename(temp, final)
    fsync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


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
