"""Tensors in files: the same bits come back, memory does not grow, and a full or forbidden place is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from slipstream.errors import ConfigError, StateError
from slipstream.ops.spill import Shelf, Spilled


def resident() -> int:
    """Bytes of this process in memory, files that it maps included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["last first", "first first"])
def test_what_is_put_comes_back_in_any_order(tmp_path: Path, dtype: torch.dtype, order: str):
    shelf, values = Shelf(tmp_path), [torch.randn(n, 7).to(dtype) for n in (3, 1000, 0, 5000, 1)]
    for _ in range(3):  # the second time in the files of the first
        puts = [shelf.put(x) for x in values]
        pairs = list(zip(puts, values, strict=True))
        for put, x in pairs if order == "first first" else reversed(pairs):
            assert torch.equal(shelf.take(put), x)
    assert not list(tmp_path.iterdir()), "the files have no names"


def test_rows_that_grow_get_larger_files_and_those_of_two_rows_do_not_meet(tmp_path: Path):
    shelf = Shelf(tmp_path)
    for size in (10, 100_000, 50, 300_000):
        a, b = torch.randn(size), torch.randn(size)
        first, second = shelf.put(a), shelf.put(b)
        assert torch.equal(shelf.take(first), a)
        third = shelf.put(b + 1)
        assert torch.equal(shelf.take(second), b) and torch.equal(shelf.take(third), b + 1)


def test_a_tensor_is_taken_once(tmp_path: Path):
    shelf = Shelf(tmp_path)
    put = shelf.put(torch.ones(3))
    shelf.take(put)
    with pytest.raises(StateError, match="twice"):
        shelf.take(put)


def test_what_is_forgotten_is_not_in_memory(tmp_path: Path):
    size = 64 << 20
    spilled = Spilled(tmp_path, size)
    tensor, before = spilled.tensor(torch.Size([size // 4]), torch.float32), resident()
    tensor.fill_(3.0)
    assert resident() - before > 0.9 * size
    spilled.forget()
    assert resident() - before < 0.1 * size
    assert float(tensor[::4096].sum()) == 3.0 * len(tensor[::4096])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        Shelf(tmp_path / "nowhere")
