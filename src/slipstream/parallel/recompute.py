"""Activations that are computed again in the backward pass, and inputs of layers that wait for it in files.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.config.train import TrainerConfig
from slipstream.models.language_model import LanguageModel
from slipstream.ops.spill import Put, Shelf
from slipstream.parallel.pipeline import own_layers


def recompute(model: LanguageModel, config: TrainerConfig) -> None:
    """Change layers in place as [trainer] says. Raises ConfigError: files cannot be written where offload.folder says."""
    if config.recompute == "none":
        return
    shelf = Shelf(config.offload.folder, config.offload.in_flight) if config.offload.activations else None
    for layer in own_layers(model):
        module = layer if config.recompute == "layer" else layer.get_submodule("ffn")
        again = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        module.forward = again if shelf is None else partial(_shelved, shelf, again)


def _shelved(shelf: Shelf, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """What `checkpoint` keeps are the arguments; of these the hidden state has a gradient, the rest is shared by all layers."""

    def put(x: Tensor) -> Tensor | Put:
        return shelf.put(x) if x.requires_grad else x

    def take(kept: Tensor | Put) -> Tensor:
        return shelf.take(kept) if isinstance(kept, Put) else kept

    with torch.autograd.graph.saved_tensors_hooks(put, take):
        return forward(*args)
