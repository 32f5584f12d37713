"""From the tensors of a checkpoint into parameters, or into the parts of them that a process keeps, one tensor at a time.

Weights in block-scaled FP8 are read (a tensor and its scales, see `matrices`): as what they stand for, or as they are into parameters that
hold codes. Tensors of prediction layers, which a model does not have, are carried from folder to folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.models.hf import INDEX, SINGLE, TensorFiles, hf_tensors, save_tensors
from slipstream.models.language_model import LanguageModel
from slipstream.models.matrices import SCALE_SUFFIX, TILE
from slipstream.models.places import Place, places
from slipstream.models.spec import ModelSpec
from slipstream.models.tensor_file import Items, TensorStream, num_bytes
from slipstream.ops.fp8 import WEIGHT, Quantised, quantise
from slipstream.ops.fp8_weight import Fp8Weight

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("_scale", "_scale_inv", "_scales")
"""Ends of the names of what quantised weights are multiplied with."""
_CONVERT = "convert it to bfloat16 first (docs/models.md, Quantised checkpoints)"
_DERIVED = ".rotary_emb.inv_freq"
"""Old Llama checkpoints store this table; it follows from config.json."""
_NAMED = 20
"""Problems that an error names, at most."""


def load_hf_tensors(model: LanguageModel, tensors: Mapping[str, Tensor], files: Mapping[str, Path] | None = None) -> None:
    """`fill` the whole of the model, converting to its dtype, or to codes where it has nothing else (`models.fp8`)."""
    table = places(model.names, model.spec, {name: p.shape for name, p in model.named_parameters()})
    whole = {name: [(memory_of(p), (0,) * p.ndim)] for name, p in model.named_parameters()}
    fill(whole, table, model.spec, model.tied_names, tensors, files)


def memory_of(parameter: nn.Parameter) -> Tensor:
    """What `fill` is given of a parameter: its values, or itself where it has codes alone."""
    return parameter if isinstance(parameter, Fp8Weight) else parameter.detach()


@torch.no_grad()
def fill(
    held: Mapping[str, Sequence[tuple[Tensor, Sequence[int]]]],
    table: Sequence[Place],
    spec: ModelSpec,
    tied: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Path] | None = None,
) -> None:
    """Copy of `tensors` (HF names) what belongs into `held`; FP8 is dequantised block by block.

    `held`: our names; boxes of the parameter: (memory, where in the whole it begins). The memory may be an `Fp8Weight` without values,
    whole or of some experts: it takes the codes of tensors in FP8 as they are, and quantises others. `table`: places of all tensors of the
    model, also of those of which nothing is held. `tied`: `LanguageModel.tied_names`. `files` (tensor to file) makes errors say where.
    Raises ModelError, before anything is changed: a tensor is missing, unexpected, of another shape or not of a float type, or FP8 without
    the scales that go with it; afterwards: a value is not finite.
    """
    files = files or {}
    problems = _problems(table, spec, tied, tensors, files)
    if problems:
        raise ModelError(f"the weights do not fit the {spec.family} model: {listed(problems)}")
    for place in table:
        for memory, starts in held.get(place.ours, ()):
            if isinstance(memory, Fp8Weight):
                _fill_codes(memory, starts, place, tensors, files)
                continue
            found = place.within(memory, starts)
            if found is None:
                continue
            target, part = found
            target.copy_(_plain(tensors, place.hf, part))
            check_finite(target, f"tensor {place.hf}{_in(files, place.hf)}")


def _fill_codes(weight: Fp8Weight, starts: Sequence[int], place: Place, tensors: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
    """The checkpoint's matrix (of all experts, or of one) into the part of the weight that is this matrix, if that holds it."""
    part = weight.parts[[0, *accumulate(weight.columns)].index(place.box[-1][0])]
    codes, scales = (
        replace(place, box=(*place.box[:-2], (0, own.shape[-2]), (0, own.shape[-1]))).within(own, starts)
        for own in (part.codes, part.scales)
    )
    if codes is None or scales is None:
        return
    (own_codes, at), (own_scales, scales_at) = codes, scales
    given, what = tensors[place.hf][at], f"tensor {place.hf}{_in(files, place.hf)}"
    if given.dtype == torch.float8_e4m3fn:
        new = Quantised(given, tensors[place.hf + SCALE_SUFFIX][scales_at].float(), WEIGHT)
        check_finite(new.dequantise(), what)
    else:
        rounded = given.to(weight.dtype)
        check_finite(rounded, what)
        new = quantise(rounded, WEIGHT, weight.power_of_two)
    own_codes.copy_(new.codes)
    own_scales.copy_(new.scales)


def listed(problems: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return "; ".join(problems[:_NAMED]) + more


def check_finite(tensor: Tensor, what: str) -> None:
    """Raises ModelError: a value is NaN or infinite."""
    if bool(torch.isfinite(tensor.sum())):
        return  # what is not finite shows in the sum, and needs no second tensor to be found
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        first = [int(i) for i in bad.nonzero()[0]]
        raise ModelError(f"{what} has {int(bad.sum())} values that are not finite, the first at {first}: {float(tensor[tuple(first)])}")


def _problems(
    table: Sequence[Place], spec: ModelSpec, tied: Mapping[str, str], tensors: Mapping[str, Tensor], files: Mapping[str, Path]
) -> list[str]:
    found, expected = [], {place.hf for place in table}
    for place in table:
        name, where = place.hf, _in(files, place.hf)
        given = tensors.get(name)
        if given is None:
            found.append(f"tensor {name} is missing{_folder_of(files)}")
        elif tuple(given.shape) != place.shape:
            found.append(f"tensor {name}{where} has shape {list(given.shape)}, but config.json implies {list(place.shape)}")
        elif given.dtype == torch.float8_e4m3fn:
            found += _scale_problems(tensors, name, where)
        elif given.dtype not in _DTYPES:
            found.append(_quantised(name, where, given.dtype))
    for name in tensors.keys() - expected:
        tied_copy = name in tied
        if tied_copy and not (tied[name] in tensors and torch.equal(tensors[name], tensors[tied[name]])):
            found.append(f"tensor {name} differs from the embedding, but config.json says tie_word_embeddings = true")
        elif not tied_copy and not name.endswith(_DERIVED) and not _is_carried(spec, name) and not _is_scale(tensors, name):
            given, where = tensors[name], _in(files, name)
            quantised = given.dtype not in _DTYPES or name.endswith(_SCALES)
            unexpected = f"tensor {name}{where} is unexpected: config.json describes no such weight"
            found.append(_quantised(name, where, given.dtype) if quantised else unexpected)
    return sorted(found, key=lambda problem: _CONVERT not in problem)


def _in(files: Mapping[str, Path], name: str) -> str:
    return f" in {files[name]}" if name in files else ""


def _folder_of(files: Mapping[str, Path]) -> str:
    folder = next(iter(files.values()), None)
    return f" from {folder.parent}" if folder else ""


def _quantised(name: str, where: str, dtype: torch.dtype) -> str:
    return f"tensor {name}{where} is {str(dtype).removeprefix('torch.')}, of a quantised checkpoint: {_CONVERT}"


def _scale_problems(tensors: Mapping[str, Tensor], name: str, where: str) -> list[str]:
    codes, scales = tensors[name], tensors.get(name + SCALE_SUFFIX)
    if scales is None:
        return [f"tensor {name}{where} is {codes.dtype}, but its scales {name}{SCALE_SUFFIX} are missing"]
    expected = [*codes.shape[:-2], *(-(-size // TILE) for size in codes.shape[-2:])]  # experts in one tensor have blocks each for itself
    if list(scales.shape) != expected or not scales.is_floating_point():
        return [f"tensor {name}{SCALE_SUFFIX}{where} is {scales.dtype} {list(scales.shape)}; expected float32 {expected}"]
    return []


def _is_scale(tensors: Mapping[str, Tensor], name: str) -> bool:
    of = name.removesuffix(SCALE_SUFFIX)
    return name.endswith(SCALE_SUFFIX) and of in tensors and tensors[of].dtype == torch.float8_e4m3fn


def _plain(tensors: Mapping[str, Tensor], name: str, part: Sequence[slice]) -> Tensor:
    """A part of a tensor, or of the values that its codes and scales stand for, of which only the blocks that it touches are looked at."""
    tensor = tensors[name]
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor[tuple(part)]
    stack, matrix = tuple(part[:-2]), part[-2:]
    blocks = [slice(s.start // TILE, -(-s.stop // TILE)) for s in matrix]
    codes = tensor[(*stack, *(slice(b.start * TILE, b.stop * TILE) for b in blocks))]
    values = Quantised(codes, tensors[name + SCALE_SUFFIX][(*stack, *blocks)].float(), WEIGHT).dequantise()
    return values[(..., *(slice(s.start - b.start * TILE, s.stop - b.start * TILE) for s, b in zip(matrix, blocks, strict=True)))]


def _is_carried(spec: ModelSpec, name: str) -> bool:
    """Whether the tensor is of a prediction layer: those are counted on behind the decoder's."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and 0 <= int(found[1]) - spec.num_layers < spec.prediction_layers


def carried(spec: ModelSpec, folder: Path, dtype: torch.dtype) -> TensorStream:
    """Tensors of prediction layers in `folder`, as they are there; FP8 ones as `dtype`. Raises ModelError: one has no fitting scales."""
    if not spec.prediction_layers or not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return TensorStream.of({})
    found = TensorFiles(folder, lambda name: _is_carried(spec, name))
    names = [name for name in found if not _is_scale(found, name)]
    codes = {name for name in names if found[name].dtype == torch.float8_e4m3fn}
    problems = [problem for name in codes for problem in _scale_problems(found, name, f" in {folder}")]
    if problems:
        raise ModelError(listed(problems))

    def items() -> Items:
        for name in names:
            whole = [slice(0, size) for size in found[name].shape]
            yield name, _plain(found, name, whole).to(dtype) if name in codes else found[name]

    return TensorStream({name: (dtype if name in codes else found[name].dtype, tuple(found[name].shape)) for name in names}, items)


def save_folder(model: LanguageModel, folder: str | Path, like: str | Path, shard_bytes: int | None = None) -> None:
    """`save_weights` of `model`."""
    save_weights(TensorStream.of(hf_tensors(model)), model.spec, folder, like, shard_bytes)


def save_weights(stream: TensorStream, spec: ModelSpec, folder: str | Path, like: str | Path, shard_bytes: int | None = None) -> None:
    """`save_tensors` of weights (HF names), and of the prediction layers that are in the folder `like`."""
    dtype = max(stream.kinds.values(), key=num_bytes)[0]  # small ones may stay float32 whatever the model's
    save_tensors(stream.then(carried(spec, Path(like), dtype)), dtype, folder, like, shard_bytes)
