"""What the trainer and the engine need of a model, and all they know of it: our decoders (`decoder`) and transformers' own modules behind
our seams (`hf_decoder`) are one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.context import Context
from slipstream.models.names import Names
from slipstream.models.spec import ModelSpec


class LanguageModel(nn.Module):
    """A decoder-only language model on one device. Build it with `slipstream.models.load`."""

    spec: ModelSpec
    names: Names
    """The checkpoint's tensors as views of the parameters."""

    @abstractmethod
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, ctx: Context) -> Tensor:
        """Hidden states [T, D] after the final norm. Ids and positions are int32 or int64; positions lie below `spec.max_positions`."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding itself where the two are tied."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the weights, but for the few that stay float32 whatever the model."""

    @property
    @abstractmethod
    def decoder_layers(self) -> Sequence[nn.Module]:
        """In order; calling one runs it."""

    @property
    @abstractmethod
    def router_parameters(self) -> Sequence[nn.Parameter]:
        """What the routers' logits are made with; empty for a dense model."""

    @property
    @abstractmethod
    def tied_names(self) -> Mapping[str, str]:
        """Tensors that a checkpoint may hold a second time: name of the copy to name of the tensor."""

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V] of hidden states as `forward` returns them."""
        return F.linear(hidden_TD, self.head_weight)
