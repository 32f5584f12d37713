"""Low-rank adapters on the matrices of a checkpoint: what multiplies is W + scale · A B, with W frozen and only A and B trained.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1; first values as PEFT has them (A uniform within
± 1/√K, B zero).

A model knows nothing of it: its parameters hold the sum. `merge` writes it after every change of A or B, and `receive` turns the gradient
of a parameter into those of its adapters: dA = scale · dW Bᵀ, dB = scale · Aᵀ dW. A matrix of the checkpoint has an adapter of its own,
whatever it is fused with, and so has every expert. A process that holds some rows of W only (`keep`) has the adapters whole; what it
receives are summands of their gradients, since each row of W adds one.

Shapes: K features in, N features out of one matrix, R rank, E experts. Ours are laid out [K, N], so A is [K, R] and B [R, N], of experts
[E, K, R] and [E, R, N]; PEFT's lora_A.weight and lora_B.weight are the transposes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.matrices import fused_columns
from slipstream.models.names import Columns, ExpertColumns

PEFT_PREFIX = "base_model.model."
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Site:
    """One matrix of the checkpoint, of all experts where it is one of experts, inside a parameter of ours."""

    ours: str
    module: str
    """Its module in the checkpoint; may hold '{expert}'."""
    kind: str
    """'attention', 'dense' or 'experts'."""
    first: int
    end: int
    """Its columns are first .. end - 1."""

    @property
    def last(self) -> str:
        return self.module.rpartition(".")[2]

    def of(self, fused: Tensor) -> Tensor:
        """View [K, N] or [E, K, N] of a tensor that is laid out as the parameter."""
        return fused[..., self.first : self.end]


class Adapters:
    """The adapters of a model, and the base weights that they are added to."""

    def __init__(self, model: Decoder, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
        """Nothing of `model` is changed. Raises ConfigError: a target matches nothing."""
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.possible = list(sites(model))
        self.sites = _chosen(self.possible, targets, model.spec.family)
        self.within = {site.ours: [other for other in self.sites if other.ours == site.ours] for site in self.sites}
        """Sites by the parameter that they are in."""
        self.parameters: dict[str, nn.Parameter] = {}
        """By module and 'lora_A' or 'lora_B', float32."""
        self._base: dict[Site, Tensor] = {}
        self._rows: dict[str, slice] = {}
        generator = torch.Generator().manual_seed(seed)
        for site in self.sites:
            base = site.of(model.get_parameter(site.ours).detach())
            self._base[site] = _kept(base)
            *experts, inputs, outputs = base.shape
            down = (2 * torch.rand(*experts, inputs, rank, generator=generator) - 1) * inputs**-0.5
            self.parameters[f"{site.module}.lora_A"] = nn.Parameter(down.to(base.device))
            self.parameters[f"{site.module}.lora_B"] = nn.Parameter(torch.zeros(*experts, rank, outputs, device=base.device))

    def keep(self, ours: str, rows: slice) -> None:
        """Of parameter `ours`, only `rows` (of its first dimension: features in, or experts) are here from now on."""
        self._rows[ours] = rows
        for site in self.within[ours]:
            self._base[site] = self._base[site][rows].clone()

    @torch.no_grad()
    def merge(self, ours: str, into: Tensor) -> None:
        """Write base + scale · A B, computed in float32, into parameter `ours` (the rows that are here), whatever its dtype."""
        for site in self.within[ours]:
            (down, at_A), (up, at_B) = self._pair(site)
            site.of(into).copy_(torch.add(self._base[site].float(), down[at_A] @ up[at_B], alpha=self.scale))

    @torch.no_grad()
    def receive(self, ours: str, grad: Tensor) -> None:
        """Add to the gradients of the adapters within parameter `ours` what follows from its gradient (in the rows that are here)."""
        for site in self.within[ours]:
            (down, at_A), (up, at_B) = self._pair(site)
            grad_W = site.of(grad).float() * self.scale
            for parameter, at, new in ((down, at_A, grad_W @ up[at_B].mT), (up, at_B, down[at_A].mT @ grad_W)):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad[at] += new

    def tensors(self) -> dict[str, Tensor]:
        """Views of the adapters under PEFT's names and in its shapes, experts one by one."""
        return {
            f"{PEFT_PREFIX}{module}.{name}.weight": view.mT
            for site in self.sites
            for name, (parameter, _) in zip(("lora_A", "lora_B"), self._pair(site), strict=True)
            for module, view in zip(self.modules(site), _one_by_one(parameter.detach()), strict=True)
        }

    def load(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Copy tensors under PEFT's names into the adapters; `source` says in errors where they are from.

        Raises ModelError, before anything is changed: a tensor is missing, unexpected, of another shape, no float, or not finite.
        """
        views = self.tensors()
        problems = [f"tensor {name} is missing" for name in views.keys() - tensors.keys()]
        problems += [f"tensor {name} is unexpected: trainer.lora.targets names no such matrix" for name in tensors.keys() - views.keys()]
        for name, view in views.items():
            problems += _problems(name, tensors[name], view) if name in tensors else []
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ModelError(f"{source} does not fit the adapters of this run: {'; '.join(sorted(problems)[:5])}{more}")
        for name, view in views.items():
            view.copy_(tensors[name])

    def modules(self, site: Site) -> list[str]:
        """Names of the modules in the checkpoint, one for each expert where there are experts."""
        if site.kind != "experts":
            return [site.module]
        return [site.module.replace("{expert}", str(expert)) for expert in range(len(self.parameters[f"{site.module}.lora_A"]))]

    def _pair(self, site: Site) -> tuple[tuple[nn.Parameter, slice], tuple[nn.Parameter, slice]]:
        """A and B, and the parts of them that belong to the rows of W that are here: of B [R, N] all of it."""
        rows = self._rows.get(site.ours, slice(None))
        down, up = self.parameters[f"{site.module}.lora_A"], self.parameters[f"{site.module}.lora_B"]
        return (down, rows), (up, rows if site.kind == "experts" else slice(None))


def sites(model: Decoder) -> Iterator[Site]:
    """Every matrix of the model that can have an adapter: those of the precision map (`models.matrices`)."""
    own, columns = dict(model.named_parameters()), fused_columns(model.names, model.spec)
    for layer in range(model.spec.num_layers):
        for entry in model.names.layer:
            ours = entry.ours.replace("{layer}", str(layer))
            if not isinstance(entry, Columns | ExpertColumns) or ours not in own.keys() & columns.keys():
                continue
            first = 0
            for (hf_name, _), width in zip(entry.parts, columns[ours], strict=True):
                module = hf_name.replace("{layer}", str(layer)).removesuffix(".weight")
                yield Site(ours, module, _kind(entry, module), first, first + width)
                first += width


def _kind(entry: Columns | ExpertColumns, module: str) -> str:
    if isinstance(entry, ExpertColumns):
        return "experts"
    return "attention" if ".self_attn." in module else "dense"


def _chosen(possible: Sequence[Site], targets: Sequence[str], family: str) -> list[Site]:
    for target in targets:
        if not any(_matches(site, target) for site in possible):
            has = ", ".join(f"{kind} ({', '.join(sorted({s.last for s in possible if s.kind == kind}))})" for kind in _kinds(possible))
            raise ConfigError(f"trainer.lora.targets: {target!r} matches no matrix of this {family} model; it has {has}")
    return [site for site in possible if any(_matches(site, target) for target in targets)]


def _kinds(possible: Sequence[Site]) -> list[str]:
    return list(dict.fromkeys(site.kind for site in possible))


def _matches(site: Site, target: str) -> bool:
    return target in ("all", site.kind, site.last)


def _kept(base: Tensor) -> Tensor:
    """A copy in bfloat16 where that holds every value (weights of a bfloat16 checkpoint), else as it is."""
    if base.is_meta:  # a model whose settings are looked at
        return base
    half = base.to(torch.bfloat16)
    return half if torch.equal(half.to(base.dtype), base) else base.clone()


def _one_by_one(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,) if tensor.ndim == 2 else tensor.unbind(0)


def _problems(name: str, given: Tensor, view: Tensor) -> list[str]:
    if given.shape != view.shape:
        return [f"tensor {name} has shape {list(given.shape)}, expected {list(view.shape)}"]
    if given.dtype not in _DTYPES:
        return [f"tensor {name} is {given.dtype}, expected one of {', '.join(map(str, _DTYPES))}"]
    return [] if bool(given.isfinite().all()) else [f"tensor {name} holds values that are not finite"]
