"""The one place that makes a model parallel, and the order in which that has to happen."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.models.decoder import Decoder
from slipstream.models.language_model import LanguageModel
from slipstream.parallel.expert import share_experts
from slipstream.parallel.fit import check_fits
from slipstream.parallel.fsdp import shard
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.pipeline import keep_stages, own_layers


def parallelise(model: LanguageModel, mesh: Mesh, dtype: torch.dtype, recompute: bool) -> None:
    """Change `model` in place. Raises ConfigError: it cannot be spread so.

    1. layers of other processes go: nothing is shared out or sharded that is not kept;
    2. experts are shared out: what is left of them is what FSDP shards;
    3. layers recompute their activations: inside of FSDP, whose hooks then see one forward and one backward pass of each layer;
    4. FSDP shards what every process holds until here.

    Context parallelism changes no model: it is a context (`parallel.context`). Alone, only recomputation is left.
    """
    check_fits(mesh.config, model.spec)
    if mesh.config.pp > 1:
        assert isinstance(model, Decoder)  # others run alone: `trainer.fit`
        keep_stages(model, mesh)
    if mesh.config.ep > 1:
        assert isinstance(model, Decoder)
        share_experts(model, mesh)
    if recompute:
        _recompute_layers(model)
    if not mesh.alone:
        assert isinstance(model, Decoder)
        shard(model, mesh, dtype)


def _recompute_layers(model: LanguageModel) -> None:
    """Drop each layer's activations after the forward pass and compute them again in the backward pass (arXiv 1604.06174)."""
    for layer in own_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
