"""Files written tensor by tensor are those that the library writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import StateError
from slipstream.models.tensor_file import TensorFile, TensorStream, cut_off, num_bytes

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float64,
]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"b": (3, 5), "a": (), 'é"\\ ': (0, 4), "model.layers.10.z": (7,), "model.layers.9.z": (2, 3, 4)}
    return {f"{name}{i}": (torch.rand(s, generator=generator) * 9).to(d) for i, d in enumerate(DTYPES) for name, s in shapes.items()}


def write(path: Path, given: dict[str, Tensor], order: list[str]) -> None:
    with TensorFile(path, TensorStream.of(given).kinds, {"format": "pt"}) as file:
        for name in order:
            assert len(file.write(name, given[name])) == num_bytes((given[name].dtype, tuple(given[name].shape)))


def test_in_whatever_order_tensors_come_the_bytes_are_the_library_s(tmp_path):
    given = tensors()
    save_file(given, tmp_path / "library", metadata={"format": "pt"})
    for order in (list(given), list(reversed(given))):
        write(tmp_path / "ours", given, order)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_transposed_tensors_are_written_row_by_row(tmp_path):
    x = torch.arange(6.0).view(2, 3)
    write(tmp_path / "f", {"x": x.T}, ["x"])
    assert torch.equal(load_file(tmp_path / "f")["x"], x.T)


def test_a_file_may_be_read_while_it_is_written_anew(tmp_path):
    write(tmp_path / "f", {"x": torch.ones(4)}, ["x"])
    mapped = load_file(tmp_path / "f")
    write(tmp_path / "f", {"x": mapped["x"] * 2}, ["x"])
    assert torch.equal(mapped["x"], torch.ones(4)) and torch.equal(load_file(tmp_path / "f")["x"], torch.full((4,), 2.0))


def test_a_file_that_lacks_a_tensor_never_gets_its_name(tmp_path):
    with pytest.raises(StateError, match=r"never written: \['y'\]"):
        write(tmp_path / "f", {"x": torch.ones(1), "y": torch.ones(1)}, ["x"])
    with pytest.raises(StateError, match=r"tensor x .* was not announced"):
        write(tmp_path / "f", {"x": torch.ones(1)}, ["x", "x"])
    assert not list(tmp_path.iterdir())


def test_what_a_short_file_lacks_is_known_as_long_as_its_header_is_there(tmp_path):
    given = {"a": torch.ones(8), "b": torch.ones(8), "c": torch.ones(8)}
    write(tmp_path / "f", given, list(given))
    data = (tmp_path / "f").read_bytes()
    assert cut_off(tmp_path / "f") == []
    (tmp_path / "f").write_bytes(data[:-33])
    assert cut_off(tmp_path / "f") == ["b", "c"]
    (tmp_path / "f").write_bytes(data[:20])
    assert cut_off(tmp_path / "f") == []
