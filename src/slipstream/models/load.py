"""From a folder or a spec to a model. The one list of families is here (their config readers are in `spec`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from slipstream.models import deepseek_v3, deepseek_v32, glm4_moe, glm_moe_dsa, gpt_oss, llama, minimax_m2, qwen3, qwen3_moe
from slipstream.models.decoder import Decoder
from slipstream.models.fill import fill, load_hf_tensors
from slipstream.models.hf import TensorFiles
from slipstream.models.impl import Impl
from slipstream.models.language_model import LanguageModel
from slipstream.models.places import places
from slipstream.models.spec import ModelSpec

_FAMILIES = {
    "qwen3_moe": qwen3_moe,
    "qwen3": qwen3,
    "llama": llama,
    "glm4_moe": glm4_moe,
    "minimax_m2": minimax_m2,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
}


def build_model(spec: ModelSpec, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> Decoder:
    """A decoder with random weights; on the meta device without any. The same seed gives the same weights, whatever the dtype."""
    family = _FAMILIES[spec.family]
    with torch.device("meta"):
        model = Decoder(spec, family.block, family.NAMES).to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    _initialise(model, seed)
    return model


def load_model(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", impl: Impl = "auto"
) -> LanguageModel:
    """The model of an HF folder, converted to `dtype`.

    Raises ModelError: an unsupported architecture, a file or tensor that is missing, truncated or of the wrong shape, a value that is not
    finite.
    """
    if impl == "hf":
        from slipstream.models.foreign.decoder import load_hf_model  # transformers' modelling code: seconds to import

        return load_hf_model(folder, dtype, device)
    tensors = TensorFiles(folder)
    model = build_model(ModelSpec.from_folder(Path(folder)), dtype, "meta").to_empty(device=device)
    load_hf_tensors(model, tensors, tensors.files)
    return model


def check_loads(folder: str | Path, impl: Impl = "auto") -> LanguageModel:
    """The model of an HF folder without memory for its weights, after a look at the tensors of the folder: names, shapes and types.

    Raises ModelError, see `load_model`; but values are not looked at.
    """
    tensors = TensorFiles(folder)
    if impl == "hf":
        from slipstream.models.foreign.decoder import empty_hf_model

        model: LanguageModel = empty_hf_model(folder, torch.float32, "meta")
    else:
        model = build_model(ModelSpec.from_folder(Path(folder)), device="meta")
    table = places(model.names, model.spec, {name: p.shape for name, p in model.named_parameters()})
    fill({}, table, model.spec, model.tied_names, tensors, tensors.files)
    return model


@torch.no_grad()
def _initialise(model: Decoder, seed: int) -> None:
    """Normal weights with standard deviation 1/sqrt(inputs), so that activations keep their size at any width.

    What writes into the residual stream is divided by sqrt(2 · layers) (Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2019, section 2.3). Norms are 1, biases and sinks 0.
    """
    generator = torch.Generator().manual_seed(seed)
    depth_scale = (2 * model.spec.num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last.endswith("bias") or last == "sinks":
            parameter.zero_()
        elif "norm" in last:
            parameter.fill_(1.0)
        else:
            inputs = parameter.shape[-1] if last in ("embed", "head") else parameter.shape[-2]
            values: Tensor = torch.randn(parameter.shape, generator=generator) * inputs**-0.5
            parameter.copy_(values * depth_scale if last in ("out", "down") else values)
