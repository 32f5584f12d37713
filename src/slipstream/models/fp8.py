"""A model whose matrices are multiplied in block-scaled FP8, for trainer and engine alike: the same map, the same codes.

Three forms: beside the values (who trains needs them), codes alone (who serves), and a stream of tensors (who publishes), in the format
in which DeepSeek-V3 is published: a matrix NAME in E4M3 and NAME_scale_inv, a float32 scale for each block of 128 x 128
(https://huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md, "FP8 Weight Documentation").
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from slipstream.models.fill import load_hf_tensors
from slipstream.models.hf import TensorFiles
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import build_model
from slipstream.models.matrices import SCALE_SUFFIX, TILE, fused_columns, is_matrix
from slipstream.models.spec import ModelSpec
from slipstream.models.tensor_file import Items, Kind, TensorStream
from slipstream.ops.fp8 import WEIGHT, quantise
from slipstream.ops.fp8_weight import Fp8Errors, Fp8Weight


def multiply_in_fp8(model: LanguageModel, power_of_two: bool, errors: Fp8Errors) -> list[Fp8Weight]:
    """Replace the matrices of the precision map by weights that are multiplied in FP8. Returns them."""
    columns, made = fused_columns(model.names, model.spec), []
    for name, parameter in list(model.named_parameters()):
        if name in columns:
            made.append(Fp8Weight.of(parameter, columns[name], power_of_two, errors))
            _set(model, name, made[-1])
    return made


def empty_in_fp8(spec: ModelSpec, power_of_two: bool) -> LanguageModel:
    """A model without values yet, that has room for the codes of those matrices and nothing else of them; the rest is bfloat16."""
    return with_room_for_codes(build_model(spec, torch.bfloat16, "meta"), power_of_two)


def with_room_for_codes(model: LanguageModel, power_of_two: bool) -> LanguageModel:
    """The same of a model on the meta device, which may have some of the experts only: it gets its memory."""
    columns = fused_columns(model.names, model.spec)
    shapes = {name: p.shape for name, p in model.named_parameters() if name in columns}
    for name in shapes:
        _set(model, name, None)
    model.to_empty(device="cpu")
    for name, shape in shapes.items():
        _set(model, name, Fp8Weight.without_values(shape, columns[name], power_of_two))
    return model.requires_grad_(False)


def load_in_fp8(folder: Path, power_of_two: bool) -> LanguageModel:
    """The model of an HF folder, quantised matrix by matrix as it is read, or not again where it is in FP8 already.

    Raises ModelError, see `models.load`.
    """
    tensors = TensorFiles(folder)
    model = empty_in_fp8(ModelSpec.from_folder(folder), power_of_two)
    load_hf_tensors(model, tensors, tensors.files)
    return model


def stream_in_fp8(tensors: TensorStream, power_of_two: bool) -> TensorStream:
    """`tensors` (HF names) with the matrices as codes and scales: those that a model in bfloat16 has by `multiply_in_fp8`."""
    kinds: dict[str, Kind] = {}
    for name, (dtype, shape) in tensors.kinds.items():
        kinds[name] = (torch.float8_e4m3fn if is_matrix(name) else dtype, shape)
        if is_matrix(name):
            kinds[name + SCALE_SUFFIX] = (torch.float32, (*shape[:-2], *(-(-size // TILE) for size in shape[-2:])))

    def items() -> Items:
        with closing(tensors.items()) as found:
            for name, tensor in found:
                if not is_matrix(name):
                    yield name, tensor
                    continue
                part = quantise(tensor.to(torch.bfloat16), WEIGHT, power_of_two)
                yield name, part.codes
                yield name + SCALE_SUFFIX, part.scales

    return TensorStream(kinds, items)


def resident_bytes(model: nn.Module) -> int:
    """Memory of the weights, each piece of it once."""
    tensors = [t for p in model.parameters() for t in (p.memory if isinstance(p, Fp8Weight) else (p.detach(),))]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def _set(model: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, parameter)
