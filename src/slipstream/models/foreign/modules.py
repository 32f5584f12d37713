"""transformers' modules of a model folder, without weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from slipstream.errors import ModelError
from slipstream.models.foreign.seams import NAME


def config_of(folder: Path) -> PreTrainedConfig:
    """Raises ModelError: transformers does not know the architecture, or its config class refuses the options."""
    source = folder / "config.json"
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a config class raises about its options
        raise ModelError(f"{source}: transformers cannot read it: {error}") from error


def build(config: PreTrainedConfig, dtype: torch.dtype, source: str, attention: str = NAME) -> PreTrainedModel:
    """The modules on the default device, with parameters that hold anything; those of transformers' buffers that are in checkpoints
    (routing biases) are float32 parameters that are not trained. `attention`: name in transformers' registry.

    Raises ModelError: no causal language model of transformers has this configuration.
    """
    try:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
            if any(hasattr(module, "_is_expert_parallel") for module in model.modules()):  # what `use_experts_implementation` adds
                model.set_experts_implementation(NAME)
        model.tie_weights()  # part of what `no_init_weights` leaves out
    except Exception as error:  # whatever a model class raises about its options
        problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"{source}: transformers builds no causal language model of it with attention of ours: {problem}") from error
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer.float(), requires_grad=False))
    return model.eval()


def embedding_of(inner: PreTrainedModel) -> Tensor:
    """[V, D]."""
    weight = inner.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def head_of(inner: PreTrainedModel, source: str) -> nn.Linear:
    """Raises ModelError: logits are made in another way."""
    head = inner.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f'{source}: with impl = "hf" the head must be a linear layer; it is {type(head).__name__}')
    return head


def layers_of(inner: PreTrainedModel, source: str) -> list[nn.Module]:
    """The decoder layers, in order."""
    wanted = inner.config.num_hidden_layers
    found = [list(child) for child in inner.base_model.children() if isinstance(child, nn.ModuleList) and len(child) == wanted]
    if inner.base_model is inner or len(found) != 1:
        raise ModelError(
            f'{source}: with impl = "hf" a model needs one list of {wanted} decoder layers; {type(inner).__name__} has {len(found)}'
        )
    return found[0]
