"""Hugging Face checkpoint folders: read and write safetensors, one file or several with an index, without losing a bit.

Knows names only through the model's table (`names`). The tensors under HF names are also what travels from trainer to engine.
Weights in block-scaled FP8 are read (a tensor and its scales, see `matrices`) and never written.
Format: https://huggingface.co/docs/safetensors and the `weight_map` index of transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.folders import atomic_folder
from slipstream.models.language_model import LanguageModel
from slipstream.models.matrices import SCALE_SUFFIX, TILE
from slipstream.models.spec import ModelSpec
from slipstream.ops.fp8 import WEIGHT, Quantised

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("_scale", "_scale_inv", "_scales")
"""Ends of the names of what quantised weights are multiplied with."""
_CONVERT = "convert it to bfloat16 first (docs/models.md, Quantised checkpoints)"
_DERIVED = ".rotary_emb.inv_freq"
"""Old Llama checkpoints store this table; it follows from config.json."""


def hf_views(model: LanguageModel, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Views of the parameters (or of `tensors` under our parameter names, such as gradients) under HF names and in HF shapes."""
    own = {name: p.detach() for name, p in model.named_parameters()} if tensors is None else tensors
    return model.names.views(model.spec, own)


def hf_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The weights in the form of the checkpoint: HF names, contiguous. Some share memory with the model: copy to keep them."""
    return {name: view.contiguous() for name, view in hf_views(model).items()}


@torch.no_grad()
def load_hf_tensors(model: LanguageModel, tensors: Mapping[str, Tensor], files: Mapping[str, Path] | None = None) -> None:
    """Copy tensors under HF names into the model, converting to its dtype; FP8 ones are dequantised one at a time.

    `files` (tensor to file) makes errors say where. Raises ModelError, before anything is changed: a tensor is missing, unexpected, of
    another shape or not of a float type, or FP8 without the scales that go with it.
    """
    views = hf_views(model)
    problems = _problems(model, views, tensors, files or {})
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(f"the weights do not fit the {model.spec.family} model: {'; '.join(problems[:5])}{more}")
    for name, view in views.items():
        view.copy_(_plain(tensors, name))


def _problems(model: LanguageModel, views: Mapping[str, Tensor], tensors: Mapping[str, Tensor], files: Mapping[str, Path]) -> list[str]:
    found = []
    for name, view in views.items():
        given, where = tensors.get(name), f" in {files[name]}" if name in files else ""
        if given is None:
            found.append(f"tensor {name} is missing{_folder_of(files)}")
        elif given.shape != view.shape:
            found.append(f"tensor {name}{where} has shape {list(given.shape)}, but config.json implies {list(view.shape)}")
        elif given.dtype == torch.float8_e4m3fn:
            found += _scale_problems(name, given, tensors.get(name + SCALE_SUFFIX), where)
        elif given.dtype not in _DTYPES:
            found.append(_quantised(name, where, given.dtype))
    for name in tensors.keys() - views.keys():
        tied_copy = name in model.tied_names
        if tied_copy and not _equal(tensors[name], tensors.get(model.tied_names[name])):
            found.append(f"tensor {name} differs from the embedding, but config.json says tie_word_embeddings = true")
        elif not tied_copy and not name.endswith(_DERIVED) and not _is_carried(model.spec, name) and not _is_scale(tensors, name):
            where = f" in {files[name]}" if name in files else ""
            quantised = tensors[name].dtype not in _DTYPES or name.endswith(_SCALES)
            unexpected = f"tensor {name}{where} is unexpected: config.json describes no such weight"
            found.append(_quantised(name, where, tensors[name].dtype) if quantised else unexpected)
    return sorted(found, key=lambda problem: _CONVERT not in problem)


def _quantised(name: str, where: str, dtype: torch.dtype) -> str:
    return f"tensor {name}{where} is {str(dtype).removeprefix('torch.')}, of a quantised checkpoint: {_CONVERT}"


def _scale_problems(name: str, codes: Tensor, scales: Tensor | None, where: str) -> list[str]:
    if scales is None:
        return [f"tensor {name}{where} is {codes.dtype}, but its scales {name}{SCALE_SUFFIX} are missing"]
    expected = [-(-size // TILE) for size in codes.shape]
    if list(scales.shape) != expected or not scales.is_floating_point():
        return [f"tensor {name}{SCALE_SUFFIX}{where} is {scales.dtype} {list(scales.shape)}; expected float32 {expected}"]
    return []


def _is_scale(tensors: Mapping[str, Tensor], name: str) -> bool:
    of = tensors.get(name.removesuffix(SCALE_SUFFIX))
    return name.endswith(SCALE_SUFFIX) and of is not None and of.dtype == torch.float8_e4m3fn


def _plain(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor itself, or the values that its codes and scales stand for."""
    tensor = tensors[name]
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    return Quantised(tensor, tensors[name + SCALE_SUFFIX].float(), WEIGHT).dequantise()


def _is_carried(spec: ModelSpec, name: str) -> bool:
    """Whether the tensor is of a prediction layer: those are counted on behind the decoder's."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and 0 <= int(found[1]) - spec.num_layers < spec.prediction_layers


def _carried(spec: ModelSpec, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of prediction layers in `folder`, as they are there; FP8 ones as `dtype`."""
    if not spec.prediction_layers or not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return {}
    found = read_tensors(folder, lambda name: _is_carried(spec, name))
    quantised = [name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn]
    problems = [p for name in quantised for p in _scale_problems(name, found[name], found.get(name + SCALE_SUFFIX), f" in {folder}")]
    if problems:
        raise ModelError("; ".join(problems[:5]))
    plain = {name: _plain(found, name).to(dtype) for name in quantised}
    return {name: plain.get(name, tensor) for name, tensor in found.items() if not _is_scale(found, name)}


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)


def _folder_of(files: Mapping[str, Path]) -> str:
    folder = next(iter(files.values()), None)
    return f" from {folder.parent}" if folder else ""


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """File of each tensor of a model folder. Raises ModelError: no weights, a broken index, a shard that is not there."""
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_tensor_names(folder / SINGLE), folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(f"model folder {folder} has no weights: expected {SINGLE}, or {INDEX} with its shards")
    try:
        weight_map = {str(name): folder / str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is broken ({type(error).__name__}: {error}); expected an object with a weight_map") from None
    for name, file in weight_map.items():
        if not file.is_file():
            raise ModelError(f"shard {file} is missing; {index.name} says that it holds {name}")
    return weight_map


def read_tensors(folder: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Tensors of a model folder under HF names, from one file or from shards. They are mapped, not copied: do not write into them.

    Raises ModelError: a file or tensor is missing, or a file is truncated or not safetensors.
    """
    by_file: dict[Path, list[str]] = {}
    for name, file in tensor_files(folder).items():
        if wanted(name):
            by_file.setdefault(file, []).append(name)
    return {name: tensor for file, names in by_file.items() for name, tensor in _read_file(file, names)}


def _read_file(file: Path, names: Iterable[str]) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            present = set(opened.keys())
            for name in names:
                if name not in present:
                    raise ModelError(f"shard {file} does not hold {name}, though the index says so")
            return [(name, opened.get_tensor(name)) for name in names]
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from None


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> ModelError:
    size = file.stat().st_size if file.exists() else 0
    return ModelError(f"{file} ({size} bytes) is truncated or not a safetensors file: {error}")


def save_folder(model: LanguageModel, folder: str | Path, like: str | Path, shard_bytes: int | None = None) -> None:
    """`save_tensors` of the weights of `model`."""
    save_tensors(hf_tensors(model), model.spec, folder, like, shard_bytes)


def save_tensors(
    tensors: Mapping[str, Tensor], spec: ModelSpec, folder: str | Path, like: str | Path, shard_bytes: int | None = None
) -> None:
    """Write an HF folder: the weights `tensors` (HF names), and config, tokenizer and templates, as they are in the folder `like`.

    So are tensors of prediction layers, which a model does not have. `shard_bytes` None: one file.
    Atomic: `folder` is whole or absent, and replaces an earlier one of that name.
    Raises ModelError: `like` is no model folder.
    """
    like = Path(like)
    if not (like / "config.json").is_file():
        raise ModelError(f"{like} is not a model folder: it has no config.json to copy")
    with atomic_folder(folder) as fresh:
        dtype = max(tensors.values(), key=lambda tensor: tensor.numel()).dtype  # small ones may stay float32 whatever the model's
        _copy_companions(like, fresh, str(dtype).removeprefix("torch."))
        write_tensors(fresh, {**tensors, **_carried(spec, like, dtype)}, shard_bytes)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int | None = None) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor gets its own) and their index."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        save_file(dict(shards[0]), folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(shard), folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shard_bytes is not None and shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _copy_companions(like: Path, fresh: Path, dtype: str) -> None:
    """Everything beside the weights, byte for byte; config.json is corrected where it says another dtype, or that weights are quantised."""
    for file in sorted(like.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, fresh / file.name)
    config: dict[str, Any] = json.loads((fresh / "config.json").read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    quantised = config.pop("quantization_config", None) is not None
    if config.get(key, "float32") != dtype or quantised:
        (fresh / "config.json").write_text(json.dumps({**config, key: dtype}, indent=2) + "\n")
