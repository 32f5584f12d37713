"""The one place that makes a model parallel, and the order in which that has to happen."""

from __future__ import annotations

import torch

from slipstream.config.train import TrainerConfig
from slipstream.models.decoder import Decoder
from slipstream.models.language_model import LanguageModel
from slipstream.parallel.expert import share_experts
from slipstream.parallel.fit import check_fits
from slipstream.parallel.fsdp import shard
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.pipeline import keep_stages
from slipstream.parallel.recompute import recompute


def parallelise(model: LanguageModel, mesh: Mesh, dtype: torch.dtype, config: TrainerConfig) -> None:
    """Change `model` in place. Raises ConfigError: it cannot be spread so.

    1. layers of other processes go: nothing is shared out or sharded that is not kept;
    2. experts are shared out: what is left of them is what FSDP shards;
    3. layers, or their feed-forward parts, recompute their activations: inside of FSDP, whose hooks then see one forward and one
       backward pass of each layer;
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
    recompute(model, config)
    if not mesh.alone:
        assert isinstance(model, Decoder)
        shard(model, mesh, dtype)
