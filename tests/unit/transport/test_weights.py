"""Policy versions on disk: identity, atomicity, and errors that name the file."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.errors import ModelError, WireError
from slipstream.models.tensor_file import TensorStream
from slipstream.trainer.publish import publish
from slipstream.transport.weights import (
    TENSORS_FILE,
    fingerprint,
    fingerprint_file,
    list_versions,
    read_header,
    read_version,
    retire,
    verify,
    version_folder,
)


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3) * scale, "a": torch.ones(4, dtype=torch.bfloat16)}


def test_equal_weights_have_equal_fingerprints_whatever_the_order_and_metadata(tmp_path):
    save_file(tensors(), tmp_path / "one.safetensors")
    save_file(dict(reversed(tensors().items())), tmp_path / "two.safetensors", metadata={"format": "pt"})
    assert fingerprint_file(tmp_path / "one.safetensors") == fingerprint_file(tmp_path / "two.safetensors")


def test_the_fingerprint_is_of_the_set_of_tensors():
    rows = [("b", "F32", (2, 3), "aa"), ("a", "BF16", (4,), "bb")]
    assert fingerprint(rows) == fingerprint(rows[::-1]) != fingerprint(rows[:1])


@pytest.mark.parametrize(
    "changed",
    [
        {**tensors(), "a": torch.zeros(4, dtype=torch.bfloat16)},
        {**tensors(), "a": torch.ones(4, dtype=torch.float16)},
        {**tensors(), "b": tensors()["b"].reshape(3, 2)},
        {"b": tensors()["b"], "c": tensors()["a"]},
    ],
    ids=["bytes", "dtype", "shape", "name"],
)
def test_any_difference_in_name_dtype_shape_or_bytes_changes_the_fingerprint(tmp_path, changed):
    save_file(tensors(), tmp_path / "one.safetensors")
    save_file(changed, tmp_path / "two.safetensors")
    assert fingerprint_file(tmp_path / "one.safetensors")[0] != fingerprint_file(tmp_path / "two.safetensors")[0]


def test_a_published_version_reads_back_verifies_and_keeps_its_tensors(tmp_path):
    version = publish(tmp_path, 3, TensorStream.of(tensors()), parent=2)
    assert read_version(version_folder(tmp_path, 3)) == version
    verify(version)
    assert {(e.name, e.dtype, e.shape) for e in read_header(Path(version.path) / TENSORS_FILE)} == {
        ("a", "BF16", (4,)),
        ("b", "F32", (2, 3)),
    }


def test_versions_are_listed_in_order_and_unfinished_ones_are_not(tmp_path):
    assert list_versions(tmp_path / "absent") == []
    for number in (10, 2, 0):
        publish(tmp_path, number, TensorStream.of(tensors(number)), parent=None)
    (tmp_path / ".tmp-v000011").mkdir()
    assert list_versions(tmp_path) == [0, 2, 10]


def test_versions_are_retired_while_the_trainer_publishes_them_again(tmp_path):
    """Neither side fails, and in the end the one that was published last is whole."""

    def publish_again():
        for i in range(600):
            publish(tmp_path, 1, TensorStream.of(tensors(float(i % 2))), parent=0)

    with ThreadPoolExecutor() as threads:
        publishing = threads.submit(publish_again)
        while not publishing.done():
            retire(tmp_path, 2)
        publishing.result()
    last = publish(tmp_path, 1, TensorStream.of(tensors()), parent=0)
    verify(last)
    retire(tmp_path, 1)
    assert list_versions(tmp_path) == [1]
    retire(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_publishing_over_a_leftover_of_a_crash_or_an_older_version_of_the_number_replaces_it(tmp_path):
    (tmp_path / ".tmp-v000001").mkdir()
    (tmp_path / ".tmp-v000001" / "junk").write_text("half written")
    first, second = (
        publish(tmp_path, 1, TensorStream.of(tensors()), parent=0),
        publish(tmp_path, 1, TensorStream.of(tensors(2.0)), parent=0),
    )
    assert first.fingerprint != second.fingerprint == read_version(version_folder(tmp_path, 1)).fingerprint
    assert not (version_folder(tmp_path, 1) / "junk").exists()


def test_a_flipped_byte_is_a_wrong_hash_and_names_the_file(tmp_path):
    version = publish(tmp_path, 1, TensorStream.of(tensors()), parent=0)
    path = Path(version.path) / TENSORS_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"v000001/model\.safetensors has fingerprint"):
        verify(version)


@pytest.mark.parametrize("size", [0, 5, 40, -1], ids=["empty", "no header length", "no header", "last byte missing"])
def test_a_truncated_file_is_named(tmp_path, size):
    version = publish(tmp_path, 1, TensorStream.of(tensors()), parent=0)
    path = Path(version.path) / TENSORS_FILE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        verify(version)


def test_files_that_are_missing_or_no_safetensors_are_named(tmp_path):
    version = publish(tmp_path, 1, TensorStream.of(tensors()), parent=0)
    path = Path(version.path) / TENSORS_FILE
    path.write_bytes((20).to_bytes(8, "little") + b"x" * 30)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        verify(version)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        verify(version)
    shutil.rmtree(version.path)
    with pytest.raises(ModelError, match=r"version\.json is missing"):
        read_version(version_folder(tmp_path, 1))


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"schema": 99}), json.dumps({"schema": 1, "number": 1})])
def test_a_version_file_that_does_not_decode_is_a_wire_error(tmp_path, text):
    version = publish(tmp_path, 1, TensorStream.of(tensors()), parent=0)
    (Path(version.path) / "version.json").write_text(text)
    with pytest.raises(WireError, match=r"version\.json"):
        read_version(Path(version.path))


def test_publishing_the_same_weights_again_leaves_the_files_that_an_engine_may_be_reading(tmp_path):
    first = publish(tmp_path, 1, TensorStream.of(tensors()), parent=0)
    inode = (Path(first.path) / TENSORS_FILE).stat().st_ino
    assert publish(tmp_path, 1, TensorStream.of(tensors()), parent=0) == first
    assert (Path(first.path) / TENSORS_FILE).stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [Path(first.path)]
