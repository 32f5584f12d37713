"""[engine] with type = "vllm": vLLM as the engine. What it does is in docs/vllm.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator

from slipstream.config.serve import EngineBase

OWNED: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.path",
        "max_model_len": "model.seq_len",
        "dtype": "engine.dtype",
        "quantization": "engine.quantization",
        "kv_cache_dtype": "engine.kv_cache_dtype",
        "kv_cache_memory_bytes": "engine.kv_memory_mib",
        "gpu_memory_utilization": "engine.kv_memory_mib",
        "block_size": "engine.block_tokens",
        "max_num_seqs": "engine.max_running",
        "max_num_batched_tokens": "engine.max_step_tokens",
        "enable_prefix_caching": "engine.prefix_cache",
        "enforce_eager": "engine.enforce_eager",
        "tensor_parallel_size": "engine.tensor_parallel",
        "data_parallel_size": "engine.data_parallel",
        "enable_expert_parallel": "engine.expert_parallel",
        "kv_offloading_size": "engine.kv_offload_mib",
        "kv_transfer_config": "engine.kv_transfer",
        "seed": "seed",
        "host": "engine.host",
        "port": "engine.port",
    }
)
"""Arguments of vLLM (underscores for dashes) that another key of ours decides."""
INTERNAL = frozenset(
    {
        "uds",
        "worker_extension_cls",
        "weight_transfer_config",
        "logprobs_mode",
        "enable_scale_out",
        "enable_prompt_tokens_details",
        "scheduling_policy",
        "generation_config",
        "disable_uvicorn_access_log",
        "disable_log_stats",
        "api_key",
        "root_path",
        "ssl_keyfile",
        "ssl_certfile",
    }
)
"""Arguments of vLLM that the adapter itself needs at a certain value: it alone speaks to the server, over a socket of its own."""


class VllmConfig(EngineBase):
    """One vLLM server (a replica) behind the adapter."""

    type: Literal["vllm"] = "vllm"
    python: Path
    """Interpreter of the environment that has vLLM (and xxhash). slipstream need not be installed there."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: str | None = None
    """vLLM's name of a quantisation that it applies to the weights when it loads them, such as "fp8"."""
    kv_cache_dtype: str = "auto"
    """vLLM's name of the type of keys and values in the cache: "auto" (that of the model), "fp8_e4m3", ..."""
    block_tokens: int | None = Field(default=None, ge=1)
    """Tokens in a KV block; none: what vLLM takes (128 on a CPU). Prefixes are found in whole blocks."""
    tensor_parallel: int = Field(default=1, ge=1)
    data_parallel: int = Field(default=1, ge=1)
    expert_parallel: bool = False
    enforce_eager: bool = True
    """No compilation and no graphs. Routing is captured only so."""
    kv_offload_mib: int = Field(default=0, ge=0)
    """Host memory for KV blocks that leave the device (vLLM's native offload); 0: none."""
    kv_transfer: dict[str, Any] = Field(default_factory=dict)
    """vLLM's kv-transfer-config, such as { kv_connector = "NixlConnector", kv_role = "kv_producer" }."""
    canary_prompts: int = Field(default=4, ge=0)
    """After every weight update the logprobs of this many fixed prompts are compared with those of a fresh load of the published weights by
    slipstream's own model on the CPU, before the version is called live. 0: not compared; then nothing tells a load that went wrong."""
    canary_tokens: int = Field(default=48, ge=2)
    """Tokens of each of these prompts."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest mean difference of their logprobs, in nats, at which a version goes live. none: 0.002 for float32, otherwise 0.1."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long vLLM may take to load the model and answer."""
    load_timeout_s: float = Field(default=600.0, gt=0)
    """How long vLLM may take to load a new policy version. Beyond it the replica ends and is started again. Who publishes waits as long as
    router.update_timeout_s says and goes on without the replica then; one that is merely slow comes back by itself."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of vLLM's processes, beside those that slipstream sets."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's server: { enable_dbo = true, max_logprobs = 5 }. True is a flag, false its --no- form, a table JSON."""

    @property
    def offload_mib(self) -> int:
        return self.kv_offload_mib

    @property
    def tolerance(self) -> float:
        return self.canary_tolerance or (0.002 if self.dtype == "float32" else 0.1)

    @model_validator(mode="after")
    def _vllm_checks(self):
        for name in self.args:
            plain = name.lstrip("-").replace("-", "_").removeprefix("no_")
            if plain in OWNED:
                raise ValueError(f"engine.args.{name} = {self.args[name]!r}: {OWNED[plain]} decides this; set that key instead")
            if plain in INTERNAL:
                raise ValueError(f"engine.args.{name} = {self.args[name]!r}: the adapter needs its own value here; leave it out")
        if self.capture_routing and not self.enforce_eager:
            raise ValueError(
                "engine.capture_routing = true and engine.enforce_eager = false: compiled models do not say which experts they use; "
                "change one of them"
            )
        if self.capture_routing and (self.kv_transfer or self.kv_offload_mib):
            raise ValueError(
                f"engine.capture_routing = true, engine.kv_transfer = {self.kv_transfer}, engine.kv_offload_mib = {self.kv_offload_mib}: "
                "routing rows do not travel with the KV blocks of vLLM; leave out one of them (the embedded engine has both)"
            )
        return self
