"""`LiveWeights` of a process that has some of the experts only: built, loaded and published to slot by slot, never whole.

Shapes: S expert slots of a layer in this process, D hidden features, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.engine.weights import LiveWeights
from slipstream.errors import StateError
from slipstream.models.fill import fill, memory_of
from slipstream.models.fp8 import with_room_for_codes
from slipstream.models.hf import TensorFiles
from slipstream.models.impl import Impl
from slipstream.models.language_model import LanguageModel
from slipstream.models.layers import MoE
from slipstream.models.load import build_model
from slipstream.models.places import places
from slipstream.models.spec import ModelSpec
from slipstream.ops.fp8_weight import Fp8Weight
from slipstream.parallel.placement import Placement
from slipstream.parallel.wide import WideExperts, move_experts


class SharedStack:
    """In the place of an expert stack's `forward`: asks the experts of all ranks."""

    def __init__(self, layer: int, stack: nn.Module, shared: WideExperts) -> None:
        self._layer, self._stack, self._shared = layer, stack, shared

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return self._shared.exchange(self._layer, self._here, x_TD, ids_TK, gates_TK)

    def _here(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return type(self._stack).forward(self._stack, x_TD, ids_TK, gates_TK)


class WideWeights(LiveWeights):
    """Every copy of the model has the experts of `shared.placement`: only the caller changes that, with `move`."""

    def __init__(self, folder: Path, dtype: torch.dtype, number: int, shared: WideExperts, fp8: str | None = None) -> None:
        self._shared = shared
        self._serving: tuple[LanguageModel | None, list[Callable[[], object]]] = None, []
        super().__init__(folder, dtype, number, fp8=fp8)

    def load(self, folder: Path, dtype: torch.dtype, impl: Impl) -> LanguageModel:
        tensors = TensorFiles(folder)
        model = self._empty(ModelSpec.from_folder(folder), dtype)
        self.fill(model, tensors)
        return model

    def _empty(self, spec: ModelSpec, dtype: torch.dtype) -> LanguageModel:
        """Without values yet, and never with more experts than it keeps."""
        model = build_model(spec, dtype, "meta")
        self._table = places(model.names, spec, {name: p.shape for name, p in model.named_parameters()})
        for moe in _layers(model):
            _keep_slots(moe.experts, self._shared.placement.num_slots, spec.num_experts)
            moe.experts.forward = SharedStack(moe.moe_layer, moe.experts, self._shared)
        return model.to_empty(device="cpu") if self._power_of_two is None else with_room_for_codes(model, self._power_of_two)

    def _another(self) -> LanguageModel:
        return self._empty(self.model.spec, self.model.dtype).eval().requires_grad_(False)

    def fill(self, model: LanguageModel, tensors: TensorFiles) -> None:
        group, placement = self._shared.group, self._shared.placement
        stacked = {id(p): moe.moe_layer for moe in _layers(model) for p in moe.experts.parameters()}
        held: dict[str, list[tuple[Tensor, Sequence[int]]]] = {}
        for name, parameter in model.named_parameters():
            memory, rest = memory_of(parameter), (0,) * (parameter.ndim - 1)
            if id(parameter) in stacked:
                experts_S = placement.experts_LRS[stacked[id(parameter)], group.rank].tolist()
                held[name] = [(_slot(memory, slot), (expert, *rest)) for slot, expert in enumerate(experts_S)]
            else:
                held[name] = [(memory, (0, *rest))]
        fill(held, self._table, model.spec, model.tied_names, tensors, tensors.files)

    def move(self, after: Placement) -> int:
        """Bring the experts of the live model to where `after` has them; no version may be prepared then. How many came from others."""
        stacks = [_stack(moe) for moe in _layers(self.model)]
        moved = move_experts(stacks, self._shared.placement, after, self._shared.group)
        self._shared.set(after)
        return moved

    def serving(self) -> list[Callable[[], object]]:
        """For each MoE layer a call that serves it without a token of our own."""
        model, layers = self._serving
        if model is self.model:
            return layers
        spec, model = self.model.spec, self.model
        x_TD = torch.empty(0, spec.hidden, dtype=model.dtype)
        nothing = x_TD, torch.empty(0, spec.top_k, dtype=torch.long), torch.empty(0, spec.top_k)
        layers = [lambda moe=moe: moe.experts(*nothing) for moe in _layers(model)]
        self._serving = model, layers
        return layers


def _layers(model: nn.Module) -> list[MoE]:
    """In order of `moe_layer`."""
    return sorted((m for m in model.modules() if isinstance(m, MoE)), key=lambda moe: moe.moe_layer)


def _stack(moe: MoE) -> Mapping[str, Tensor]:
    """What has to travel when experts do, each [S, ...]: values, or codes (as bytes) and scales."""
    found: dict[str, Tensor] = {}
    for name, p in moe.experts.named_parameters():
        if not isinstance(p, Fp8Weight):
            found[name] = p.detach()
            continue
        for number, part in enumerate(p.parts):
            found[f"{name}.codes{number}"], found[f"{name}.scales{number}"] = part.codes.view(torch.uint8), part.scales
    return found


def _slot(memory: Tensor, slot: int) -> Tensor:
    return memory.expert(slot) if isinstance(memory, Fp8Weight) else memory[slot : slot + 1]


def _keep_slots(stack: nn.Module, slots: int, num_experts: int) -> None:
    """Parameters of `slots` experts in the place of those of all, on the meta device still."""
    for name, weight in list(stack.named_parameters()):
        if weight.shape[0] != num_experts:
            raise StateError(f"{name} {tuple(weight.shape)} of {type(stack).__name__} has no entry for each of {num_experts} experts")
        owner, _, last = name.rpartition(".")
        setattr(stack.get_submodule(owner), last, nn.Parameter(weight.detach()[:slots].clone(), requires_grad=False))
