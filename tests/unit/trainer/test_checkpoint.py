"""Checkpoints: whole or not there, verified, and never at the cost of the one before."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from slipstream.errors import ModelError
from slipstream.parallel.pieces import Piece
from slipstream.trainer import checkpoint, shards
from slipstream.trainer.checkpoint import Checkpoint, list_steps, newest, prune, read, step_folder
from slipstream.trainer.shards import shard_name, write_shard


def save(root: Path, step: int, size: int = 8) -> Checkpoint:
    """As two processes do: each has half of two tensors."""
    temp, whole = checkpoint.begin(root, step), torch.full((size,), float(step))
    try:
        shards = {}
        for rank, (first, end) in enumerate(((0, size // 2), (size // 2, size))):
            staged = {"model/w": (whole[first:end], (first,)), "exp_avg/w": (whole[first:end] * 2, (first,))}
            shards[shard_name(rank)] = write_shard(temp / shard_name(rank), staged)
        return checkpoint.commit(temp, step, shards, {"bad_steps": step}, {"cursor": [step, None]}, "cafe")
    except BaseException:
        checkpoint.discard(temp)
        raise


def whole(found: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors, in one process."""
    stored = found.tensors()
    held = {name: Piece(torch.empty(shape, dtype=dtype), (0,) * len(shape), shape, False) for name, (dtype, shape) in stored.kinds.items()}
    stored.read(held)
    return {name: piece.local for name, piece in held.items()}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_everything_that_was_saved_is_read_back(tmp_path):
    saved = save(tmp_path, 3)
    found = newest(tmp_path)
    assert found == saved == read(step_folder(tmp_path, 3))
    assert (found.step, found.state, found.orchestrator_state) == (3, {"bad_steps": 3}, {"cursor": [3, None]})
    assert found.config_fingerprint == "cafe"
    tensors = whole(found)
    assert tensors.keys() == {"model/w", "exp_avg/w"}
    assert torch.equal(tensors["model/w"], torch.full((8,), 3.0))
    assert torch.equal(tensors["exp_avg/w"], torch.full((8,), 6.0))


def test_a_run_that_never_saved_has_no_checkpoint(tmp_path):
    assert newest(tmp_path / "absent") is None


@pytest.mark.parametrize("name", ["shard_00000.safetensors", "shard_00001.safetensors", "state.json", "manifest.json"])
def test_damage_to_any_file_is_found_and_named(tmp_path, name):
    save(tmp_path, 1)
    path = step_folder(tmp_path, 1) / name
    damage(path)
    with pytest.raises(ModelError, match=name):
        read(step_folder(tmp_path, 1))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=name):
        read(step_folder(tmp_path, 1))
    path.unlink()
    with pytest.raises(ModelError, match=rf"{name} is missing"):
        read(step_folder(tmp_path, 1))


def test_a_changed_value_in_the_manifest_is_found(tmp_path):
    save(tmp_path, 1)
    path = step_folder(tmp_path, 1) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "orchestrator_state": {"cursor": [2, None]}}))
    with pytest.raises(ModelError, match=r"manifest\.json has hash \w+, it says \w+ itself"):
        read(step_folder(tmp_path, 1))


def test_a_damaged_newest_checkpoint_is_an_error_that_names_the_way_back(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(step_folder(tmp_path, 3) / "shard_00001.safetensors")
    (step_folder(tmp_path, 2) / "state.json").unlink()
    with pytest.raises(ModelError) as caught:
        newest(tmp_path)
    message = str(caught.value)
    assert "step_000003/shard_00001.safetensors has hash" in message and "the manifest says" in message
    assert f"step 1 is whole. To go back to it, delete what is newer (rm -r {tmp_path}/step_000002 {tmp_path}/step_000003)" in message
    assert list_steps(tmp_path) == [1, 2, 3]


def test_when_no_checkpoint_is_whole_the_run_does_not_start_from_scratch(tmp_path):
    save(tmp_path, 1)
    damage(step_folder(tmp_path, 1) / "shard_00001.safetensors")
    with pytest.raises(ModelError, match="No other checkpoint is whole: restore the file, or start afresh with --clean"):
        newest(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"schema": 1', '"x"', ""])
def test_a_manifest_that_is_no_manifest_is_named(tmp_path, text):
    save(tmp_path, 1)
    (step_folder(tmp_path, 1) / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match=r"step_000001/manifest\.json"):
        newest(tmp_path)


def test_a_process_killed_before_the_rename_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        shutil.copytree(tmp_path / ".tmp-step_000002", tmp_path / "what a kill leaves")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "rename", die)
        save(tmp_path, 2)
    os.rename(tmp_path / "what a kill leaves", tmp_path / ".tmp-step_000002")
    found = newest(tmp_path)
    assert found is not None and found.step == 1
    assert save(tmp_path, 2).step == 2 and not (tmp_path / ".tmp-step_000002").exists()


def test_a_full_disk_is_an_os_error_and_leaves_nothing_behind_but_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError) as caught:
            save(tmp_path, 2, size=50_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and "step_000002" in caught.value.filename
    assert os.listdir(tmp_path) == ["step_000001"]
    assert newest(tmp_path).step == 1  # type: ignore[union-attr]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, size=8)
    assert len(whole(save(tmp_path, 1, size=16))["model/w"]) == 16
    assert os.listdir(tmp_path) == ["step_000001"]


def test_pruning_keeps_the_newest_and_says_which_is_the_oldest_left(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert prune(tmp_path, keep_last=2) == 10
    assert list_steps(tmp_path) == [10, 15]
    assert prune(tmp_path, keep_last=3) == 10


def test_a_folder_that_is_no_checkpoint_is_no_obstacle(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step_000001.bak").mkdir()
    assert newest(tmp_path).step == 1  # type: ignore[union-attr]


def test_a_shard_that_does_not_read_back_as_it_was_written_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "fsync_file", damage)  # a disk that loses a bit
    with pytest.raises(ModelError, match=r"shard_00000\.safetensors does not hold what was written to it: model/w differ"):
        save(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_damage_is_named_by_tensor(tmp_path):
    save(tmp_path, 1)
    path = step_folder(tmp_path, 1) / "shard_00001.safetensors"
    damage(path)  # the last byte: of model/w, which comes after exp_avg/w
    with pytest.raises(ModelError, match=r"the file is damaged \(tensor model/w\)"):
        read(step_folder(tmp_path, 1))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"truncated or not of this checkpoint; it ends within or before tensor model/w"):
        read(step_folder(tmp_path, 1))


def test_torch_reads_it_too(tmp_path):
    save(tmp_path, 4)
    found = {"model/w": torch.zeros(8), "exp_avg/w": torch.zeros(8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        load(found, storage_reader=HuggingFaceStorageReader(str(step_folder(tmp_path, 4))), no_dist=True)
    assert torch.equal(found["model/w"], torch.full((8,), 4.0)) and torch.equal(found["exp_avg/w"], torch.full((8,), 8.0))


def test_any_part_is_read_from_the_files_that_have_it(tmp_path):
    whole = torch.arange(24.0).view(6, 4)
    temp = checkpoint.begin(tmp_path, 1)
    entries = {}
    for rank, (first, end) in enumerate(((0, 1), (1, 5), (5, 6))):
        entries[shard_name(rank)] = write_shard(temp / shard_name(rank), {"model/w": (whole[first:end], (first, 0))})
    stored = checkpoint.commit(temp, 1, entries, {}, {}, "").tensors()
    assert stored.kinds == {"model/w": (torch.float32, (6, 4))}
    for first, end, left, right in ((0, 6, 0, 4), (0, 2, 1, 3), (4, 6, 0, 1), (2, 3, 3, 4), (3, 3, 0, 4)):
        local = torch.full((end - first, right - left), float("nan"))
        stored.read({"model/w": Piece(local, (first, left), (6, 4), True)})
        assert torch.equal(local, whole[first:end, left:right])


def test_a_stored_value_that_is_not_finite_is_named(tmp_path):
    temp = checkpoint.begin(tmp_path, 1)
    entry = write_shard(temp / shard_name(0), {"exp_avg/w": (torch.tensor([1.0, float("nan")]), (0,))})
    found = checkpoint.commit(temp, 1, {shard_name(0): entry}, {}, {}, "")
    with pytest.raises(ModelError, match=r"tensor exp_avg/w of .*step_000001 has 1 values that are not finite, the first at \[1\]: nan"):
        whole(found)
