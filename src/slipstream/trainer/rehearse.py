"""What the trainer refuses at its start and `trainer.fit` cannot see from sizes alone, asked of a model without memory for weights.

Imports torch, and reads the names, shapes and types of the checkpoint's tensors, no values; of adapters that are there, those too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from slipstream.config.train import TrainerConfig
from slipstream.models.decoder import Decoder
from slipstream.models.impl import Impl
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import check_loads
from slipstream.models.matrices import fused_columns
from slipstream.ops.spill import Shelf
from slipstream.parallel.fp8_gather import check_shards
from slipstream.trainer.away import Away
from slipstream.trainer.lora import make_adapters


def weight_checks(folder: Path, impl: Impl, config: TrainerConfig) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is looked at, and a call that raises ModelError or ConfigError."""
    model = cache(lambda: check_loads(folder, impl))
    yield "tensors of the checkpoint", model
    if (lora := config.lora) is not None and impl != "hf":
        yield "adapters", lambda: make_adapters(_ours(model()), lora)
    if impl != "hf" and config.dtype == "float8" and config.parallel.fp8_all_gather and config.parallel.processes > 1:
        yield "shards in FP8", lambda: check_shards(model(), fused_columns(model().names, model().spec), config.parallel)
    if config.offload.moments:
        yield "folder for moments", lambda: Away(config.offload.folder)
    if config.offload.activations:
        yield "folder for activations", lambda: Shelf(config.offload.folder)


def _ours(model: LanguageModel) -> Decoder:
    assert isinstance(model, Decoder)  # `trainer.fit`
    return model
