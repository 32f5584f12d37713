"""[engine]: what every engine has, and the embedded engine; vLLM's keys are in `config.vllm`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section
from slipstream.config.disaggregation import DisaggregationConfig, Role
from slipstream.config.speculation import NoSpeculation, Speculation
from slipstream.config.tiers import TiersConfig
from slipstream.config.wide import WideConfig
from slipstream.errors import ConfigError


class EngineBase(Section):
    """What every engine has, whatever computes."""

    replicas: int = Field(default=1, ge=1)
    """Number of engine processes that `slipstream rl` starts."""
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback is your decision."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free port, told to the other roles through the run folder. Replica i listens on port + i."""
    kv_memory_mib: int = Field(default=128, ge=1)
    """Memory for the paged KV cache (keys, values and routing rows); at least one sequence of model.seq_len must fit."""
    max_running: int = Field(default=64, ge=1)
    """Most sequences decoded together."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Most tokens processed in one engine step; longer prompts are prefilled in chunks."""
    prefix_cache: bool = True
    capture_routing: bool = True
    """Record which experts each token used, for router replay."""
    on_update: Literal["keep", "recompute", "abort"] = "keep"
    """What a weight update does to running sequences: keep their KV, recompute it under the new weights, or abort them."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests beyond this many waiting ones are refused (HTTP 429)."""
    threads: int = Field(default=1, ge=1)
    """OpenMP threads of the process."""

    @property
    def ranks(self) -> int:
        """Processes of ours that share one model."""
        return 1

    @property
    def offload_mib(self) -> int:
        """Most memory of a replica for KV that the device has no room for."""
        return 0

    def role(self, replica: int) -> Role:
        """What replica number `replica` does."""
        return "mixed"

    @model_validator(mode="after")
    def _cross_checks(self):
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"engine.max_step_tokens = {self.max_step_tokens} and engine.max_running = {self.max_running}: "
                "a decode step needs one token for each running sequence, so max_step_tokens must be at least max_running"
            )
        if self.port + self.replicas - 1 > 65535:
            raise ValueError(
                f"engine.port = {self.port} and engine.replicas = {self.replicas}: replica i listens on port + i, at most 65535"
            )
        return self


class EngineConfig(EngineBase):
    """One embedded engine process (a replica)."""

    type: Literal["embedded"] = "embedded"
    dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    """float8: bfloat16, with the matrices of the precision map multiplied in block-scaled FP8, with the codes of trainer.dtype = "float8";
    these are all that is held of them, half the memory. Emulated on the CPU, for its numbers and not for speed."""
    fp8_scales: Literal["float32", "power_of_two"] = "float32"
    """Of float8, as trainer.fp8_scales."""
    kv_dtype: Literal["auto", "float8"] = "auto"
    """Keys and values in the cache. auto: float32 with dtype = "float32", else bfloat16. float8: E4M3 with a scale for each token and head,
    about half of bfloat16; index keys of sparse attention stay as they are."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Of the product of hidden states and head, as trainer.head_dtype."""
    block_tokens: int = Field(default=16, ge=1)
    """Tokens in a KV block."""
    max_kv_age: int | None = Field(default=None, ge=0)
    """Most policy versions between the live one and one that wrote KV in use; older blocks are forgotten, and running sequences that
    hold one are recomputed. None: no bound (a rollout keeps the KV of its prefix). on_update = "recompute" is the same as 0."""
    speculation: Speculation = NoSpeculation()
    ep: WideConfig = WideConfig()
    """Engine processes that share the experts of one model."""
    tiers: TiersConfig = TiersConfig()
    """Where KV goes that the device has no room for."""
    disaggregation: DisaggregationConfig = DisaggregationConfig()

    @property
    def ranks(self) -> int:
        return self.ep.ranks

    @property
    def offload_mib(self) -> int:
        return self.tiers.ram_mib + (self.tiers.queue_mib if self.tiers.disk_mib or self.tiers.shared_mib else 0)

    def role(self, replica: int) -> Role:
        prefill = self.disaggregation.prefill_replicas
        if not prefill:
            return "mixed"
        return "prefill" if replica >= self.replicas - prefill else "decode"

    @model_validator(mode="after")
    def _embedded_checks(self):
        if self.tiers.enabled and not self.prefix_cache:
            raise ValueError(
                "engine.prefix_cache = false and engine.tiers is set: blocks of the tiers are found through the prefix cache; "
                "set engine.prefix_cache = true or leave the tiers out"
            )
        if self.replicas % self.ep.ranks:
            raise ValueError(
                f"engine.replicas = {self.replicas} and engine.ep.ranks = {self.ep.ranks}: replicas counts processes, of which groups of "
                f"`ranks` share the experts; use a multiple of {self.ep.ranks} replicas"
            )
        prefill = self.disaggregation.prefill_replicas
        if prefill >= self.replicas and prefill:
            raise ValueError(
                f"engine.disaggregation.prefill_replicas = {prefill} and engine.replicas = {self.replicas}: at least one replica must "
                "decode, so prefill_replicas must be below replicas"
            )
        if prefill and self.ep.ranks > 1:
            raise ValueError(
                f"engine.disaggregation.prefill_replicas = {prefill} and engine.ep.ranks = {self.ep.ranks}: processes that share "
                "experts do not hand blocks over yet; use one of the two"
            )
        if prefill and not self.prefix_cache:
            raise ValueError(
                f"engine.disaggregation.prefill_replicas = {prefill} and engine.prefix_cache = false: blocks from a prefill engine are "
                "found through the prefix cache; turn it on"
            )
        ports, handoffs = range(self.port, self.port + self.replicas), range(self.disaggregation.port, self.disaggregation.port + prefill)
        if self.port and self.disaggregation.port and set(ports) & set(handoffs):
            raise ValueError(
                f"engine.port = {self.port}, replicas = {self.replicas} and engine.disaggregation.port = {self.disaggregation.port}: "
                "replicas listen on engine.port + i, and prefill engines also on disaggregation.port + i: keep them apart"
            )
        if self.disaggregation.port + prefill > 65536:
            raise ValueError(
                f"engine.disaggregation.port = {self.disaggregation.port} and prefill_replicas = {prefill}: "
                "the i-th prefill engine listens on port + i, at most 65535"
            )
        return self


def embedded(engine: EngineBase) -> EngineConfig:
    """For what only the embedded engine can do. Raises ConfigError for another one."""
    if not isinstance(engine, EngineConfig):
        raise ConfigError('engine.type: this command uses the embedded engine in its own process; add --set engine.type="embedded"')
    return engine


class SamplingConfig(Section):
    """How rollouts are sampled. Truncating the distribution (top_p, top_k, min_p) biases importance ratios: prefer temperature alone."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int = Field(default=128, ge=1)
    """Most tokens in one turn."""
    stop: tuple[str, ...] = ()
