"""Whether a model's logits are its head times its last hidden state, and nothing more: tried with a small head and random states."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import ModelError

_TOKENS, _ROWS = 3, 8


def check_head(inner: PreTrainedModel, head: nn.Linear, source: str) -> None:
    """Raises ModelError where trainer and engine, which multiply with the head themselves, would compute other logits."""
    hidden, place = head.in_features, next((name for name, module in inner.named_children() if module is head), "")
    if not place:
        raise ModelError(f'{source}: with impl = "hf" the head must stand beside the decoder in {type(inner).__name__}')
    generator = torch.Generator().manual_seed(0)
    states_TD = torch.randn(_TOKENS, hidden, generator=generator)
    small = nn.Linear(hidden, _ROWS, bias=head.bias is not None)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    tried = copy.copy(inner)
    tried._modules = {**inner._modules, inner.base_model_prefix: _Given(states_TD), place: small}
    with torch.no_grad():
        logits_TV: Tensor = tried(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long)).logits[0]
    if not torch.allclose(logits_TV, F.linear(states_TD, small.weight), atol=1e-5 * hidden**0.5):
        what = "the head has a bias" if head.bias is not None else "the logits are not the head times the last hidden state"
        raise ModelError(f'{source}: not supported with impl = "hf": {what}')


class _Given(nn.Module):
    """In place of the decoder: hidden states that are given."""

    def __init__(self, states_TD: Tensor) -> None:
        super().__init__()
        self._states_TD = states_TD

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self._states_TD[None])


class _Output:
    """A decoder's output that holds nothing but the states."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None
