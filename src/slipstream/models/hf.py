"""Hugging Face checkpoint folders: read and write safetensors, one file or several with an index, without losing a bit.

Knows names only through the model's table (`names`). The tensors under HF names are also what travels from trainer to engine. Whole models
are never in memory here: files are mapped to read them, and written tensor by tensor. How tensors become parameters: `fill`.
Format: https://huggingface.co/docs/safetensors and the `weight_map` index of transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.folders import atomic_folder
from slipstream.models.language_model import LanguageModel
from slipstream.models.tensor_file import Kind, TensorFile, TensorStream, cut_off, num_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def hf_views(model: LanguageModel, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Views of the parameters (or of `tensors` under our parameter names, such as gradients) under HF names and in HF shapes."""
    own = {name: p.detach() for name, p in model.named_parameters()} if tensors is None else tensors
    return model.names.views(model.spec, own)


def hf_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The weights in the form of the checkpoint: HF names, contiguous. Some share memory with the model: copy to keep them."""
    return {name: view.contiguous() for name, view in hf_views(model).items()}


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


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a model folder under HF names, from one file or from shards. They are mapped, not copied: do not write into them.

    One file is mapped at a time, and as long as a tensor of it is in use. Raises ModelError: a file or tensor is missing, or a file is
    truncated or not safetensors.
    """

    def __init__(self, folder: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.files = {name: file for name, file in tensor_files(folder).items() if wanted(name)}
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> Tensor:
        file = self.files[name]
        try:
            if self._open is None or self._open[0] != file:
                self._open = file, safe_open(file, framework="pt")
            return self._open[1].get_tensor(name)
        except (SafetensorError, OSError) as error:
            if "does not contain tensor" in str(error):
                raise ModelError(f"shard {file} does not hold {name}, though the index says so") from None
            raise _unreadable(file, error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a model folder, mapped. Raises ModelError, see `TensorFiles`."""
    return dict(TensorFiles(folder))


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> ModelError:
    size = file.stat().st_size if file.exists() else 0
    cut = cut_off(file)
    lost = f"; the file ends within or before {_few(cut)}" if cut else ""
    return ModelError(f"{file} ({size} bytes) is truncated or not a safetensors file: {error}{lost}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def save_tensors(stream: TensorStream, dtype: torch.dtype, folder: str | Path, like: str | Path, shard_bytes: int | None = None) -> None:
    """Write an HF folder: the tensors (HF names), one at a time, and config, tokenizer and templates, as they are in the folder `like`.

    `dtype`: what config.json says. `shard_bytes` None: one file.
    Atomic: `folder` is whole or absent, and replaces an earlier one of that name.
    Raises ModelError: `like` is no model folder.
    """
    like = Path(like)
    if not (like / "config.json").is_file():
        raise ModelError(f"{like} is not a model folder: it has no config.json to copy")
    with atomic_folder(folder) as fresh:
        _copy_companions(like, fresh, str(dtype).removeprefix("torch."))
        write_stream(fresh, stream, shard_bytes)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int | None = None) -> None:
    """`write_stream` of tensors that are there already."""
    write_stream(folder, TensorStream.of(tensors), shard_bytes)


def write_stream(folder: Path, stream: TensorStream, shard_bytes: int | None = None) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor gets its own) and their index."""
    shards = _shards(stream.kinds, shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    paths = [folder / name for name in names] if len(shards) > 1 else [folder / SINGLE]
    with closing(stream.items()) as items:
        for path, kinds in zip(paths, shards, strict=True):
            with TensorFile(path, kinds, {"format": "pt"}) as file:
                for name, tensor in islice(items, len(kinds)):
                    file.write(name, tensor)
    if len(shards) > 1:
        weight_map = {name: path.name for path, kinds in zip(paths, shards, strict=True) for name in kinds}
        index = {"metadata": {"total_size": sum(map(num_bytes, stream.kinds.values()))}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(kinds: Mapping[str, Kind], shard_bytes: int | None) -> list[dict[str, Kind]]:
    shards: list[dict[str, Kind]] = [{}]
    used = 0
    for name, kind in kinds.items():
        if shard_bytes is not None and shards[-1] and used + num_bytes(kind) > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = kind
        used += num_bytes(kind)
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
