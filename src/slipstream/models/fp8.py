"""A model whose matrices are multiplied in block-scaled FP8, for trainer and engine alike: the same map, the same codes."""

from __future__ import annotations

from slipstream.models.language_model import LanguageModel
from slipstream.models.matrices import fused_columns
from slipstream.ops.fp8_weight import Fp8Errors, Fp8Weight


def multiply_in_fp8(model: LanguageModel, power_of_two: bool, errors: Fp8Errors) -> list[Fp8Weight]:
    """Replace the matrices of the precision map by weights that are multiplied in FP8. Returns them."""
    columns, made = fused_columns(model.names, model.spec), []
    for name, parameter in list(model.named_parameters()):
        if name in columns:
            owner, _, last = name.rpartition(".")
            made.append(Fp8Weight.of(parameter, columns[name], power_of_two, errors))
            setattr(model.get_submodule(owner), last, made[-1])
    return made
