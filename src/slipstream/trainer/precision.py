"""float32 weights to train, and the copy of them in the compute dtype that runs forward and backward.

In float32 both are the same module. In bfloat16 a second module computes; each of its gradients is added to the float32 gradient of
its master as soon as it is complete, so rows accumulate in float32, and after an optimizer step the copy is rounded from the masters.
What is published is the copy: exactly the weights that the next step trains from.

In float8 the second module is in bfloat16, and its matrices (the precision map, `models.matrices`) are quantised from there once a step,
then multiplied in FP8. An engine that quantises the published copy by the same map has the same codes.

A model that is sharded over processes needs no second module: FSDP keeps float32 shards, gathers them rounded, and adds up gradients
in float32 (`parallel.fsdp`). Both are then the sharded module, and rounding is left to whoever publishes. In float8 a matrix is quantised
from what was gathered, since its blocks know nothing of shards, and each time that it is: to keep the codes from the forward to the
backward pass would be to keep the whole model in every process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.config.train import TrainerConfig
from slipstream.models.fp8 import multiply_in_fp8
from slipstream.models.language_model import LanguageModel
from slipstream.models.layers import MoE
from slipstream.models.matrices import fused_columns
from slipstream.ops.fp8_weight import Fp8Errors, Fp8Weight
from slipstream.parallel.fp8_gather import GatheredCodes, gather_codes
from slipstream.parallel.mesh import ALONE, Mesh


class Weights:
    """`master` is optimised and checkpointed; `compute` runs and is published."""

    def __init__(self, master: LanguageModel, config: TrainerConfig, mesh: Mesh = ALONE, in_place: bool = False) -> None:
        """`in_place`: the master itself is brought into the compute dtype, and no gradient is handed over."""
        self.master = master
        self.compute = master
        self._fp8: list[Fp8Weight] = []
        self._codes: dict[str, GatheredCodes] = {}
        self._errors, self._mesh, self._config = Fp8Errors(), mesh, config
        self._power_of_two = config.fp8_scales == "power_of_two"
        if config.dtype != "float32" and mesh.alone:
            self.compute = (master if in_place else copy.deepcopy(master)).to(torch.bfloat16)
            if config.dtype == "float8":
                self._fp8 = multiply_in_fp8(self.compute, self._power_of_two, self._errors)
            for source, target in zip(self.compute.parameters(), master.parameters(), strict=True):
                if source.requires_grad and source is not target:
                    source.register_post_accumulate_grad_hook(_hand_over_to(target))

    def sharded(self) -> None:
        """To be called once the model is sharded, if it is. Raises ConfigError: `fp8_all_gather` of shards that cut blocks."""
        if self._config.dtype != "float8" or self._mesh.alone:
            return
        columns = fused_columns(self.master.names, self.master.spec)
        if self._config.parallel.fp8_all_gather:
            self._codes = gather_codes(self.master, columns, self._power_of_two, self._errors)
        multiply_gathered_in_fp8(self.master, columns, self._power_of_two, self._errors, self._codes, self._mesh)

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer is given, by name; of these, what requires a gradient trains."""
        return dict(self.master.named_parameters())

    @property
    def columns(self) -> Mapping[str, Sequence[int]]:
        """Which of `trained` are matrices, and the widths of those side by side in them."""
        return fused_columns(self.master.names, self.master.spec)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The masters that train."""
        return [p for p in self.trained.values() if p.requires_grad]

    @torch.no_grad()
    def sync(self) -> None:
        """Round the masters into the compute copy, and quantise what is multiplied in FP8."""
        if self.compute is not self.master:
            for copied, master in zip(self.compute.parameters(), self.master.parameters(), strict=True):
                copied.copy_(master)
        self.requantise()

    def requantise(self) -> None:
        for weight in self._fp8:
            weight.requantise()
        for codes in self._codes.values():
            codes.stale()

    def metrics(self) -> dict[str, float]:
        """What rounding to FP8 did since the last call, in all processes; empty in other dtypes."""
        self._mesh.add_up(self._errors.sums_K4)
        errors = self._errors.shares()
        self._errors.reset()
        metrics = {f"trainer/fp8/{kind}_error": error for kind, (error, _) in errors.items()}
        return metrics | ({"trainer/fp8/grad_underflow_frac": errors["grad"][1]} if "grad" in errors else {})


def multiply_gathered_in_fp8(
    model: LanguageModel,
    columns: Mapping[str, Sequence[int]],
    power_of_two: bool,
    errors: Fp8Errors,
    codes: Mapping[str, GatheredCodes],
    mesh: Mesh,
) -> None:
    """The same for a model that FSDP has sharded: the parameters `columns` become such weights when they are first gathered, of their
    gathered values or of the `codes` that came instead.

    The other weights of a layer get float32 gradients too, which loses nothing: FSDP adds up gradients of one dtype.
    """

    def gathered(module: nn.Module, _: object, prefix: str, times: int) -> None:
        for last, p in module.named_parameters():
            name = f"{prefix}.{last}"
            if isinstance(p, Fp8Weight | DTensor):  # done; or gathered by a module inside of this one
                continue
            if name in codes:
                Fp8Weight.turn_into(p, columns[name], power_of_two, errors, codes=codes[name].parts)
                p.untyped_storage().resize_(0)
            elif name in columns:
                Fp8Weight.turn_into(p, columns[name], power_of_two, errors, times)
            elif p.requires_grad:
                p.grad_dtype = torch.float32

    layers = set(model.decoder_layers)
    for name, module in model.named_modules():
        if module in layers:
            module.register_forward_pre_hook(partial(gathered, prefix=name, times=1))
        if isinstance(module, MoE) and mesh.config.ep > 1:  # each process has one part of `ep` of them
            module.experts.register_forward_pre_hook(partial(gathered, prefix=f"{name}.experts", times=mesh.config.ep))


def _hand_over_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.to(master.dtype)
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        parameter.grad = None

    return hand_over
