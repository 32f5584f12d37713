"""Models in block-scaled FP8: what is held, that the codes are everywhere the same, and that nothing is quantised twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.errors import ModelError
from slipstream.models.fp8 import load_in_fp8, multiply_in_fp8, resident_bytes, stream_in_fp8
from slipstream.models.hf import hf_tensors, read_tensors, write_stream, write_tensors
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import load_model
from slipstream.models.matrices import SCALE_SUFFIX, is_matrix
from slipstream.models.tensor_file import TensorStream
from slipstream.ops.fp8_weight import Fp8Weight, Uncounted
from tests.unit.trainer.helpers import model_folder
from tests.unit.trainer.test_fp8 import FAMILIES, SIZES


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), **{**SIZES, **FAMILIES[request.param]})


def codes(model: LanguageModel) -> dict[str, list[Tensor]]:
    """Bytes of the codes, and scales, by parameter."""
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, Fp8Weight)}
    return {name: [t for part in p.parts for t in (part.codes.view(torch.uint8), part.scales)] for name, p in weights.items()}


def assert_same(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> None:
    assert a.keys() == b.keys() and a
    for name, tensors in a.items():
        assert all(torch.equal(mine, other) for mine, other in zip(tensors, b[name], strict=True)), name


def beside_values(folder: Path, power_of_two: bool) -> LanguageModel:
    """As the trainer has it: bfloat16, and codes made from that."""
    model = load_model(folder, torch.bfloat16)
    multiply_in_fp8(model, power_of_two, Uncounted())
    return model


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_same_quantised_beside_values_on_loading_or_in_a_stream(folder, tmp_path, dtype, power_of_two):
    expected = codes(beside_values(folder, power_of_two))
    assert_same(codes(load_in_fp8(folder, power_of_two)), expected)
    published = stream_in_fp8(TensorStream.of(hf_tensors(load_model(folder, dtype))), power_of_two)
    write_stream(tmp_path, published)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = read_tensors(tmp_path)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == dict(published.kinds)
    assert {name for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn} == {name for name in tensors if is_matrix(name)}
    assert_same(codes(load_in_fp8(tmp_path, not power_of_two)), expected)  # what is in FP8 already is taken as it is


def test_what_arrives_in_fp8_is_not_quantised_again(folder, tmp_path):
    """Twice the scale and half the code stand for the same value; to quantise it again would undo that."""
    tensors = dict(read_tensors(folder))
    published = dict(stream_in_fp8(TensorStream.of(tensors), False).items())
    for name in [name for name in published if name.endswith(SCALE_SUFFIX)]:
        matrix = name.removesuffix(SCALE_SUFFIX)
        published[name], published[matrix] = published[name] * 2, (published[matrix].float() / 2).to(torch.float8_e4m3fn)
    write_tensors(tmp_path, published)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    taken, plain = codes(load_in_fp8(tmp_path, False)), codes(load_in_fp8(folder, False))
    for name, parts in taken.items():
        assert all(torch.equal(mine, 2 * other) for mine, other in zip(parts[1::2], plain[name][1::2], strict=True))
    loaded = load_model(tmp_path)  # and it is still read as values where values are wanted
    for name, tensor in hf_tensors(loaded).items():
        assert torch.allclose(tensor, tensors[name].float(), atol=0.1)


def test_a_matrix_takes_a_byte_a_value_and_its_scales_and_the_rest_two(folder):
    model = load_in_fp8(folder, False)
    shapes = {name: tensor.shape for name, tensor in hf_tensors(load_model(folder)).items()}
    expected = 0
    for name, shape in shapes.items():
        tiles = torch.Size([*shape[:-2], *(-(-size // 128) for size in shape[-2:])])
        kept_whole = "e_score_correction_bias" in name
        expected += shape.numel() + 4 * tiles.numel() if is_matrix(name) else (4 if kept_whole else 2) * shape.numel()
    assert resident_bytes(model) == expected
    beside, plain = beside_values(folder, False), load_model(folder, torch.bfloat16)
    assert resident_bytes(model) < resident_bytes(plain) < resident_bytes(beside)


class Largest(TorchDispatchMode):
    """The largest tensor of values, not codes, that any operation on the CPU makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_cpu and tensor.dtype in (torch.bfloat16, torch.float32):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_values_exist_one_tensor_of_the_checkpoint_at_a_time(tmp_path):
    folder = model_folder(tmp_path / "model", num_experts=64, hidden_size=128, moe_intermediate_size=64)
    with Largest() as seen:
        load_in_fp8(folder, False)
    file = (folder / "model.safetensors").stat().st_size // 4  # a mapped file is the storage of its tensors
    stack = 64 * 128 * 128
    with Largest() as whole:
        load_model(folder, torch.bfloat16)
    assert whole.numel >= min(stack, file) and seen.numel < stack


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(folder, tmp_path, bad):
    tensors = {name: tensor.clone() for name, tensor in read_tensors(folder).items()}
    name = next(name for name in tensors if is_matrix(name) and "layers.1" in name)
    tensors[name].view(-1)[3] = bad
    write_tensors(tmp_path, tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"{name}.*not finite"):
        load_in_fp8(tmp_path, False)
    if bad != bad:
        published = dict(stream_in_fp8(TensorStream.of(dict(read_tensors(folder))), False).items())
        published[name] = published[name].contiguous()
        published[name].view(torch.uint8).view(-1)[3] = 0x7F
        write_tensors(tmp_path, published)
        with pytest.raises(ModelError, match=rf"{name}.*not finite"):
            load_in_fp8(tmp_path, False)
