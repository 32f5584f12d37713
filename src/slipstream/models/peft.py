"""Adapters in PEFT's folder format: adapter_config.json and adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint; the keys of the configuration are those of peft.LoraConfig. Options
that would change what the tensors mean are refused, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.folders import atomic_folder
from slipstream.models.lora import Adapters

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""What these keys may say where they are given. Other first values (PiSSA and its kin) change the base weights."""
_OFF = (
    *("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "trainable_token_indices", "layer_replication", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config"),
)
"""Keys that must be absent, null, false or empty."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter that has been read."""

    rank: int
    alpha: float
    tensors: dict[str, Tensor]
    """Under PEFT's names."""


def read_adapter(folder: Path) -> PeftAdapter:
    """Raises ModelError: a file is missing or does not decode, or an option is not implemented."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_bytes())
        rank, alpha = int(values["r"]), float(values["lora_alpha"])
    except FileNotFoundError:
        raise ModelError(f"{folder} is no PEFT adapter: {CONFIG} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is broken ({type(error).__name__}: {error}); expected an object with r and lora_alpha") from None
    for key, allowed in _PLAIN.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ModelError(f"{path}: {key} = {values[key]!r} is not implemented; expected one of {list(allowed)}")
    for key in _OFF:
        if values.get(key):
            raise ModelError(f"{path}: {key} = {values[key]!r} is not implemented; save the adapter without it")
    try:
        return PeftAdapter(rank, alpha, load_file(folder / TENSORS))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder / TENSORS} is missing, truncated or not a safetensors file: {error}") from None


def write_adapter(folder: Path, adapters: Adapters, base_model: Path) -> None:
    """Write the adapters in float32. Atomic, as `folders.atomic_folder`. `base_model` is named as what they belong to."""
    alpha = int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha
    modules, parameters = targets(adapters)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": adapters.rank,
        "lora_alpha": alpha,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with atomic_folder(folder, holds=CONFIG) as fresh:
        (fresh / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        tensors = {name: view.contiguous() for name, view in adapters.tensors().items()}
        save_file(tensors, fresh / TENSORS, metadata={"format": "pt"})


def targets(adapters: Adapters) -> tuple[list[str], list[str]]:
    """target_modules and target_parameters: what PEFT gives adapters to.

    Modules stand by their last name where all modules of that name have an adapter (PEFT takes it for all of them), else in full. In a
    model with experts PEFT (0.21, with transformers 5) takes a name such as `gate_proj` for the experts', which transformers keeps
    fused, and loses dense layers that have it too: those stand among the parameters.
    """
    of_experts = {site.last for site in adapters.possible if site.kind == "experts"}
    hidden = [site for site in adapters.sites if site.kind == "dense" and site.last in of_experts]
    short = {site.last for site in adapters.possible} - {site.last for site in adapters.possible if site not in adapters.sites}
    rest = [site for site in adapters.sites if site not in hidden]
    modules = {site.last if site.last in short else module for site in rest for module in adapters.modules(site)}
    return sorted(modules), sorted(f"{site.module}.weight" for site in hidden)
