"""FP8 all-gather: processes send the codes and scales of their shards in place of bfloat16 values, which halves what FSDP moves.

Each process quantises its shard once a step. That gives the codes of the whole matrix where no block of 128 x 128 is cut by an edge between
shards (FSDP cuts the first dimension: stacks between experts, other matrices between input features); anything else is refused.

It is one of FSDP's all-gather extensions (`fsdp_pre_all_gather`, `fsdp_post_all_gather` of the local tensor of a sharded parameter),
added once the model is sharded: what is sharded, optimised and saved stays an ordinary float32 tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from slipstream.config.parallel import ParallelConfig
from slipstream.errors import ConfigError
from slipstream.models.language_model import LanguageModel
from slipstream.ops.fp8 import DEPTH, WEIGHT, Quantised, quantise
from slipstream.ops.fp8_weight import Fp8Errors


class GatheredCodes:
    """The codes and scales of one weight that FSDP gathers, from shards that are quantised here."""

    def __init__(self, shard: Tensor, columns: Sequence[int], power_of_two: bool, errors: Fp8Errors) -> None:
        self._shard, self._columns, self._power_of_two, self._errors = shard, tuple(columns), power_of_two, errors
        self._sent: tuple[Tensor, ...] = ()
        self.parts: tuple[Quantised, ...] = ()
        """Of the whole weight, in buffers of FSDP: filled while it is gathered, the same tensors each time."""

    def stale(self) -> None:
        """The shard has new values."""
        self._sent = ()

    def before(self, mesh: Any, size: torch.Size, stride: Any, module: Any, precision: Any) -> tuple[tuple[Tensor, ...], torch.Size]:
        """What this process sends: (codes, scales of each matrix), and the size of the whole weight."""
        if not self._sent:
            matrices = self._shard.to(torch.bfloat16).split(self._columns, -1)
            parts = [quantise(matrix, WEIGHT, self._power_of_two) for matrix in matrices]
            for matrix, part in zip(matrices, parts, strict=True):
                self._errors.add("weight", matrix, part)
            codes = torch.cat([part.codes.view(torch.uint8) for part in parts], -1)
            self._sent = (codes, *(part.scales for part in parts))
        return self._sent, size

    def after(self, outputs: tuple[Tensor, ...], size: torch.Size, dtype: torch.dtype, out: Tensor | None = None) -> Any:
        """Rows of all processes, in order of rank. FSDP wants a parameter of the whole size: nobody reads its values."""
        if out is not None:
            return None
        codes, *scales = outputs
        matrices = codes.view(torch.float8_e4m3fn).split(self._columns, -1)
        self.parts = tuple(Quantised(matrix, scale, WEIGHT) for matrix, scale in zip(matrices, scales, strict=True))
        return torch.empty(size, dtype=dtype), ()


def gather_codes(
    model: LanguageModel, columns: Mapping[str, Sequence[int]], power_of_two: bool, errors: Fp8Errors
) -> dict[str, GatheredCodes]:
    """Have the parameters `columns` of a model that is sharded gathered so. By name, those that travel.

    Raises ConfigError: an edge between shards cuts a block.
    """
    made = {}
    for name, param in _sharded(model):
        if name not in columns or param.shard_mesh.size() == 1:  # all of it is here: FSDP sends nothing, and asks no extension
            continue
        check_edges(name, param.sharded_param.shape, param.shard_mesh.size())
        shard = param.sharded_param._local_tensor
        made[name] = gathered = GatheredCodes(shard, columns[name], power_of_two, errors)
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = gathered.before, gathered.after
        param._init_extensions()
    return made


def check_shards(model: LanguageModel, columns: Mapping[str, Sequence[int]], parallel: ParallelConfig) -> None:
    """The same of a model that is not sharded yet, and may be without memory. Raises ConfigError: an edge would cut a block."""
    for name, parameter in model.named_parameters():
        if name in columns:
            shared = parallel.ep if parameter.ndim == 3 else 1  # who shares experts has some of them, whole
            shards = parallel.fsdp // shared
            if shards > 1:
                check_edges(name, torch.Size((parameter.shape[0] // shared, *parameter.shape[1:])), shards)


def check_edges(name: str, shape: torch.Size, shards: int) -> None:
    """Raises ConfigError: the shards of a weight [K, N], or [E, K, N] of experts, would have other codes than the whole."""
    unit, what = (1, "experts") if len(shape) == 3 else (DEPTH, f"blocks of {DEPTH} input features")
    if shape[0] % (shards * unit):
        raise ConfigError(
            f"trainer.parallel.fp8_all_gather = true: {name} {tuple(shape)} is sharded over {shards} processes, and "
            f"{shape[0] / unit:g} {what} cannot be shared out evenly, so the codes of the shards would not be those of the whole; choose "
            "other processes, or set it to false"
        )


def _sharded(model: LanguageModel) -> Iterator[tuple[str, Any]]:
    """(name, FSDP's own record) of every sharded parameter."""
    names = {(module, last): f"{name}.{last}" for name, module in model.named_modules() for last in module._parameters}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    yield names[param._module_info.module, param._module_info.param_name], param
