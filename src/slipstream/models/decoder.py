"""The decoder: embedding, layers, final norm and head, on one device. Never branches on training or serving.

Shapes: T tokens, D hidden features, V vocabulary, r rotated features of a head, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.context import Context
from slipstream.models.language_model import LanguageModel
from slipstream.models.layers import Block, empty
from slipstream.models.names import EMBEDDING, NameTable
from slipstream.models.rotary import rope_tables
from slipstream.models.spec import ModelSpec
from slipstream.ops import rms_norm


class Decoder(LanguageModel):
    """A model of one of our families."""

    def __init__(self, spec: ModelSpec, block: Callable[[ModelSpec, int], Block], names: NameTable) -> None:
        super().__init__()
        self.spec, self.names = spec, names
        self.embed = empty(spec.vocab_size, spec.hidden)
        self.layers = nn.ModuleList(block(spec, layer) for layer in range(spec.num_layers))
        self.norm = empty(spec.hidden)
        self.head = None if spec.tie_embeddings else empty(spec.vocab_size, spec.hidden)
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, ctx: Context) -> Tensor:
        return self.leave(self.through(self.enter(token_ids_T), positions_T, ctx, 0, self.spec.num_layers))

    def enter(self, token_ids_T: Tensor) -> Tensor:
        """What the first layer reads, [T, D]."""
        return F.embedding(token_ids_T, self.embed)

    def through(self, x_TD: Tensor, positions_T: Tensor, ctx: Context, first: int, end: int) -> Tensor:
        """Layers first ... end - 1."""
        cos_Pr, sin_Pr = self._rope_tables(x_TD)
        cos_Tr, sin_Tr = cos_Pr.index_select(0, positions_T), sin_Pr.index_select(0, positions_T)
        for layer in islice(self.layers, first, end):
            x_TD = layer(x_TD, cos_Tr, sin_Tr, ctx)
        return x_TD

    def leave(self, x_TD: Tensor) -> Tensor:
        """The final norm of what the last layer wrote."""
        return rms_norm(x_TD, self.norm, self.spec.rms_eps)

    @property
    def head_weight(self) -> Tensor:
        return self.embed if self.head is None else self.head

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)

    @property
    def router_parameters(self) -> Sequence[nn.Parameter]:
        return [p for name, p in self.named_parameters() if name.endswith((".router", ".router_logit_bias"))]

    @property
    def tied_names(self) -> Mapping[str, str]:
        return {"lm_head.weight": EMBEDDING} if self.head is None else {}

    def _rope_tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [P, r], made at the first pass: a model built on the meta device has no place for them before.

        No buffers, so that they are in no checkpoint and `to_empty` cannot leave them without values.
        """
        if self._rope is None or self._rope[0].dtype != like.dtype or self._rope[0].device != like.device:
            self._rope = rope_tables(self.spec, like.dtype, like.device)
        return self._rope
