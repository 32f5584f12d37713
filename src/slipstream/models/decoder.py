"""The decoder: embedding, layers, final norm and head, on one device. Never branches on training or serving.

Shapes: T tokens, D hidden features, V vocabulary, r rotated features of a head, P positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.context import Context
from slipstream.models.layers import Block, empty
from slipstream.models.names import NameTable
from slipstream.models.rotary import rope_tables
from slipstream.models.spec import ModelSpec
from slipstream.ops import rms_norm


class Decoder(nn.Module):
    """A decoder-only language model. Build it with `slipstream.models.load`."""

    def __init__(self, spec: ModelSpec, block: Callable[[ModelSpec, int], Block], names: NameTable) -> None:
        super().__init__()
        self.spec, self.names = spec, names
        self.embed = empty(spec.vocab_size, spec.hidden)
        self.layers = nn.ModuleList(block(spec, layer) for layer in range(spec.num_layers))
        self.norm = empty(spec.hidden)
        self.head = None if spec.tie_embeddings else empty(spec.vocab_size, spec.hidden)
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, ctx: Context) -> Tensor:
        """Hidden states [T, D] after the final norm. Ids and positions are int32 or int64; positions lie below `spec.max_positions`."""
        x_TD = F.embedding(token_ids_T, self.embed)
        cos_Pr, sin_Pr = self._rope_tables(x_TD)
        cos_Tr, sin_Tr = cos_Pr.index_select(0, positions_T), sin_Pr.index_select(0, positions_T)
        for layer in self.layers:
            x_TD = layer(x_TD, cos_Tr, sin_Tr, ctx)
        return rms_norm(x_TD, self.norm, self.spec.rms_eps)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding itself where the two are tied."""
        return self.embed if self.head is None else self.head

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V] of hidden states as `forward` returns them."""
        return F.linear(hidden_TD, self.head_weight)

    def _rope_tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [P, r], made at the first pass: a model built on the meta device has no place for them before.

        No buffers, so that they are in no checkpoint and `to_empty` cannot leave them without values.
        """
        if self._rope is None or self._rope[0].dtype != like.dtype or self._rope[0].device != like.device:
            self._rope = rope_tables(self.spec, like.dtype, like.device)
        return self._rope
