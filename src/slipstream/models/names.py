"""How our parameters lie in the tensors of a Hugging Face checkpoint: a table of views, one per family, as data.

Each entry cuts one parameter of ours into views that have the names and shapes of the checkpoint. Everything follows from that one
direction: saving reads the views, loading copies into them, gradients and optimizer state get HF names by viewing those tensors.
It never copies and knows no files. Ours are fused and laid out [in, out]; HF's are separate and [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from slipstream.errors import StateError
from slipstream.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

Parts = tuple[tuple[str, str], ...]
"""(HF name, attribute of ModelSpec with the number of features, such as "latent.q_rank") side by side in one fused parameter."""


EMBEDDING = "model.embed_tokens.weight"


class Names(Protocol):
    """How a model's parameters lie in the checkpoint's tensors: a `NameTable`, or what transformers says (`hf_decoder`)."""

    @property
    def layer(self) -> tuple[Entry, ...]:
        """The entries of one decoder layer; () where there is no table."""
        ...

    def views(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views under HF names of tensors under our names (parameters, their gradients, or anything of the same shapes)."""
        ...

    def cut(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
        """(our name, HF name, view) of each of them."""
        ...


class Entry(Protocol):
    """One parameter of ours (`ours` may hold '{layer}') and its views."""

    @property
    def ours(self) -> str: ...

    def views(self, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        """(HF name, view of `tensor`); together they cover every element once."""
        ...


@dataclass(frozen=True)
class Same:
    """The same tensor under another name."""

    ours: str
    hf: str

    def views(self, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        yield self.hf, tensor


@dataclass(frozen=True)
class Stacked:
    """Vectors [features] laid end to end: the biases of fused projections."""

    ours: str
    parts: Parts

    def views(self, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, size in self.parts:
            end = start + attrgetter(size)(spec)
            yield name, tensor[start:end]
            start = end


@dataclass(frozen=True)
class Columns:
    """Matrices [out, in] transposed and laid side by side: ours is [in, Σ out]."""

    ours: str
    parts: Parts

    def views(self, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, size in self.parts:
            end = start + attrgetter(size)(spec)
            yield name, tensor[:, start:end].T
            start = end


@dataclass(frozen=True)
class ExpertColumns:
    """`Columns` for every expert ('{expert}' in the HF names): ours is [experts, in, Σ out]."""

    ours: str
    parts: Parts

    def views(self, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        for expert, matrix in enumerate(tensor.unbind(0)):
            for name, view in Columns(self.ours, self.parts).views(matrix, spec):
                yield name.replace("{expert}", str(expert)), view


@dataclass(frozen=True)
class ExpertStack:
    """Matrices of all experts in one tensor of the checkpoint, [experts, in, out] there too."""

    ours: str
    hf: str
    widths: tuple[str, ...]
    """Attributes of ModelSpec that add up to out."""

    def views(self, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        yield self.hf, tensor


@dataclass(frozen=True)
class NameTable:
    """All parameters of a family, in the order in which they are saved."""

    model: tuple[Entry, ...]
    """Once a model."""
    layer: tuple[Entry, ...]
    """Once a decoder layer. Entries whose parameter a model does not have (biases, norms, experts, a tied head) do not apply."""

    def views(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views under HF names of tensors under our names (parameters, their gradients, or anything of the same shapes).

        Raises StateError: a tensor is in no entry.
        """
        return {hf: view for _, hf, view in self.cut(spec, tensors)}

    def cut(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
        """(our name, HF name, view) of each of them, in the order of the table."""
        left = dict(tensors)
        for prefix, entry in self._entries(spec.num_layers):
            ours = entry.ours.replace("{layer}", prefix)
            tensor = left.pop(ours, None)
            if tensor is not None:
                for hf, view in entry.views(tensor, spec):
                    yield ours, hf.replace("{layer}", prefix), view
        if left:
            raise StateError(f"the name table of {spec.family} has no entry for {sorted(left)}")

    def _entries(self, num_layers: int) -> Iterator[tuple[str, Entry]]:
        for entry in self.model:
            yield "", entry
        for layer in range(num_layers):
            for entry in self.layer:
                yield str(layer), entry


DECODER = (
    Same("embed", EMBEDDING),
    Same("norm", "model.norm.weight"),
    Same("head", "lm_head.weight"),
)
"""Shared by all families: the ends of the decoder."""

ATTENTION = (
    Same("layers.{layer}.attention_norm", "model.layers.{layer}.input_layernorm.weight"),
    Columns(
        "layers.{layer}.attention.qkv",
        (
            ("model.layers.{layer}.self_attn.q_proj.weight", "q_rows"),
            ("model.layers.{layer}.self_attn.k_proj.weight", "kv_rows"),
            ("model.layers.{layer}.self_attn.v_proj.weight", "kv_rows"),
        ),
    ),
    Stacked(
        "layers.{layer}.attention.qkv_bias",
        (
            ("model.layers.{layer}.self_attn.q_proj.bias", "q_rows"),
            ("model.layers.{layer}.self_attn.k_proj.bias", "kv_rows"),
            ("model.layers.{layer}.self_attn.v_proj.bias", "kv_rows"),
        ),
    ),
    Columns("layers.{layer}.attention.out", (("model.layers.{layer}.self_attn.o_proj.weight", "hidden"),)),
    Same("layers.{layer}.attention.out_bias", "model.layers.{layer}.self_attn.o_proj.bias"),
)
"""Shared by all families: attention with its input norm; biases where the model has them."""

FFN_NORM = Same("layers.{layer}.ffn_norm", "model.layers.{layer}.post_attention_layernorm.weight")

DENSE = (
    FFN_NORM,
    Columns(
        "layers.{layer}.ffn.gate_up",
        (
            ("model.layers.{layer}.mlp.gate_proj.weight", "intermediate"),
            ("model.layers.{layer}.mlp.up_proj.weight", "intermediate"),
        ),
    ),
    Columns("layers.{layer}.ffn.down", (("model.layers.{layer}.mlp.down_proj.weight", "hidden"),)),
)
"""Shared by all families: a dense gated feed-forward layer with its input norm."""
