"""Weights of which only adapters train: `models.lora` within the trainer's dtypes and processes.

There is one model, in the compute dtype, and its parameters hold base plus adapters: what runs is what is published, bit for bit. Beside it
stand the frozen base of the matrices with an adapter and the adapters themselves, in float32 with the only gradients and moments. The
gradient of a merged matrix exists from its own backward pass until the hook on it has run, one layer at a time.

Of several processes each keeps its rows of the base, as FSDP and expert parallelism deal them out, and all adapters with their moments;
gradients of adapters are added up once a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from slipstream.config.lora import LoraConfig
from slipstream.config.train import TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models.decoder import Decoder
from slipstream.models.lora import Adapters
from slipstream.models.peft import read_adapter
from slipstream.parallel.fsdp import local
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.pieces import pieces
from slipstream.trainer.precision import Weights


class LoraWeights(Weights):
    """`master` and `compute` are the same merged model. `attach` comes after it was made parallel."""

    def __init__(self, model: Decoder, config: TrainerConfig, lora: LoraConfig, mesh: Mesh) -> None:
        """`model` holds the float32 base. Raises ConfigError: targets or the adapter to start from do not fit; ModelError: see there."""
        self.mesh = mesh
        self.adapters = make_adapters(model, lora)
        model.requires_grad_(False)
        for ours in self.adapters.within:
            model.get_parameter(ours).requires_grad_(True)
        super().__init__(model, config, mesh, in_place=True)

    def attach(self) -> None:
        for ours in self.adapters.within:
            parameter = self.compute.get_parameter(ours)
            if not self.mesh.alone:
                here = pieces({ours: parameter}, self.mesh)[ours]
                self.adapters.keep(ours, slice(here.starts[0], here.starts[0] + len(here.local)))
            parameter.register_post_accumulate_grad_hook(_hand_over_to(self.adapters, ours))
        self.sync()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return self.adapters.parameters

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        return {name: (parameter.shape[-1],) for name, parameter in self.trained.items()}

    @torch.no_grad()
    def sync(self) -> None:
        for ours in self.adapters.within:
            self.adapters.merge(ours, local(self.compute.get_parameter(ours).detach()))
        self.requantise()

    @torch.no_grad()
    def combine(self) -> None:
        """Add up the gradients of the adapters over the processes, of which every copy (HSDP) has the same."""
        if self.mesh.alone:
            return
        for parameter in self.parameters:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.mesh.add_up(grad / self.mesh.config.dp_replicate)


def make_adapters(model: Decoder, lora: LoraConfig) -> Adapters:
    """As [trainer.lora] says, with the values that `lora.path` names. Raises ConfigError: targets or that adapter do not fit; ModelError:
    it cannot be read."""
    adapters = Adapters(model, lora.rank, lora.alpha, lora.targets, lora.seed)
    if lora.path is None:
        return adapters
    found = read_adapter(lora.path)
    for key, own, given in (("rank", lora.rank, found.rank), ("alpha", lora.alpha, found.alpha)):
        if own != given:
            raise ConfigError(f"trainer.lora.{key} = {own}, but the adapter {lora.path} has {given}: set trainer.lora.{key} = {given}")
    adapters.load(found.tensors, f"the adapter {lora.path}")
    return adapters


def _hand_over_to(adapters: Adapters, ours: str) -> Callable[[Tensor], None]:
    def hand_over(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad, None
        adapters.receive(ours, local(grad))

    return hand_over
