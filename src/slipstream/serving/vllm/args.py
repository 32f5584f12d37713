"""Our configuration as the command line of vLLM's server. Pure: starts nothing, imports no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.config.vllm import VllmConfig

BACKEND = "slipstream"
"""Name under which the plugin registers its weight-transfer backend."""
EXTENSION = "slipstream.serving.vllm.plugin.RoutingCapture"
SPANS = "slipstream.serving.vllm.middleware.Spans"
MIB = 1 << 20


def arguments(config: VllmConfig, model: Path, seq_len: int, seed: int, socket: Path, cpu: bool) -> list[str]:
    """Everything after the module name. `socket`: the Unix socket to listen on. `cpu`: vLLM's CPU build.

    That build (0.32) dies when the prompt of a request with a seed is prefilled in chunks ("CPU Generator does not use offset" in
    gpu_model_runner._bookkeeping_sync): there, prompts are prefilled whole.
    """
    step_tokens = max(config.max_step_tokens, seq_len) if cpu else config.max_step_tokens
    named: dict[str, Any] = {
        "model": str(model),
        "uds": str(socket),
        "max_model_len": seq_len,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_cache_memory_bytes": config.kv_memory_mib * MIB,
        "block_size": config.block_tokens,
        "max_num_seqs": config.max_running + config.canary_prompts,
        "max_num_batched_tokens": step_tokens + config.canary_prompts,
        "enable_chunked_prefill": False if cpu else None,
        "enable_prefix_caching": config.prefix_cache,
        "enforce_eager": config.enforce_eager or None,
        "tensor_parallel_size": config.tensor_parallel,
        "data_parallel_size": config.data_parallel,
        "enable_expert_parallel": config.expert_parallel or None,
        "kv_offloading_size": config.kv_offload_mib / 1024 or None,
        "kv_transfer_config": config.kv_transfer or None,
        "seed": seed,
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION if config.capture_routing else None,
        "disable_uvicorn_access_log": True,
        **config.args,
    }
    words = [word for name, value in named.items() for word in _words(name.lstrip("-").replace("_", "-"), value)]
    return [*words, "--middleware", SPANS]


def _words(name: str, value: Any) -> list[str]:
    """One argument as a command line has it; none for None."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
