"""The whole run file, and the checks that need more than one section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from slipstream.config.base import Section
from slipstream.config.cluster import ClusterConfig
from slipstream.config.envs import EnvConfig, EvalConfig
from slipstream.config.gateway import GatewayConfig
from slipstream.config.model import ModelConfig
from slipstream.config.router import RouterConfig
from slipstream.config.serve import EngineConfig
from slipstream.config.train import SftConfig, TrainerConfig
from slipstream.config.vllm import VllmConfig


def _engine_type(value: Any) -> str:
    return value.get("type", "embedded") if isinstance(value, Mapping) else getattr(value, "type", "")


AnyEngine = Annotated[
    Annotated[EngineConfig, Tag("embedded")] | Annotated[VllmConfig, Tag("vllm")],
    Discriminator(
        _engine_type,
        custom_error_type="engine_type",
        custom_error_message='engine.type: expected "embedded" (the default) or "vllm"',
    ),
]
"""`type` may be left out: embedded."""


class BySamples(Section):
    """A batch is a fixed number of samples."""

    type: Literal["samples"] = "samples"
    samples: int = Field(default=64, ge=1)


class ByTokens(Section):
    """A batch is closed by the sample that brings it to this many tokens; what is over is carried to the next."""

    type: Literal["tokens"] = "tokens"
    tokens: int = Field(default=16384, ge=1)


class ConcurrencyConfig(Section):
    """How many rollouts run at once: grown while the engine has room, cut when its KV cache is tight."""

    initial: int = Field(default=64, ge=1)
    min: int = Field(default=8, ge=1)
    max: int = Field(default=256, ge=1)
    adaptive: bool = True
    kv_high_frac: float = Field(default=0.9, gt=0, le=1)
    """Cut concurrency above this KV use (multiplicative), grow it below (additive)."""
    tasks_per_minute: float | None = Field(default=None, gt=0)
    """Rate limit on new groups."""

    @model_validator(mode="after")
    def _ordered(self):
        if not self.min <= self.initial <= self.max:
            raise ValueError(f"concurrency.min = {self.min}, initial = {self.initial}, max = {self.max}: need min <= initial <= max")
        return self


class FilterConfig(Section):
    """A check on rollouts or groups before they are trained."""

    type: Literal["zero_advantage", "repetition", "gibberish"]
    mode: Literal["monitor", "enforce"] = "enforce"
    """monitor: count only. enforce: drop what is caught (counted by reason)."""
    window: int = Field(default=32, ge=2)
    """repetition: the same n-gram pattern over this many consecutive tokens."""
    min_logprob: float = -12.0
    """gibberish: mean logprob of the sampled tokens below this."""


class CurriculumConfig(Section):
    """Which tasks to practise, by pass rate. Everything it does is reversible."""

    type: Literal["uniform", "pass_rate"] = "uniform"
    """pass_rate: sampling weight p(1 - p) + floor over the estimated pass rate p."""
    floor: float = Field(default=0.05, gt=0)
    ema: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in the pass-rate estimate."""
    retire_above: float = Field(default=1.01, gt=0)
    """Retire tasks whose estimate stays above this (1.01: never)."""
    retire_below: float = Field(default=-0.01, lt=1)
    """Retire tasks whose estimate stays below this (-0.01: never)."""
    retire_after: int = Field(default=3, ge=1)
    """Groups in a row beyond a bound before a task is retired."""
    revisit_every: int = Field(default=50, ge=1)
    """Groups after which one retired task is tried again; it returns when it is no longer beyond the bound."""


class OrchestratorConfig(Section):
    """Rollouts in, batches out."""

    batch: Annotated[BySamples | ByTokens, Field(discriminator="type")] = BySamples()
    max_off_policy_steps: int = Field(default=2, ge=0)
    """Largest lag of a trained token: version that the batch trains from minus version that sampled the token. 0: synchronous."""
    stale: Literal["drop", "mask"] = "drop"
    """What happens to a rollout with tokens that are too old: drop it, or mask those tokens and train the rest."""
    group_quorum: float = Field(default=1.0, gt=0, le=1)
    """Share of a group's rollouts after which it closes `group_grace_s` later without the rest (the rest is cut)."""
    group_grace_s: float = Field(default=5.0, ge=0)
    min_group: int = Field(default=2, ge=1)
    """Fewest gradable rollouts for a group to be trained; smaller ones are dropped (reason 'small_group')."""
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    filters: tuple[FilterConfig, ...] = (FilterConfig(type="zero_advantage"),)
    curriculum: CurriculumConfig = CurriculumConfig()
    max_fruitless_groups: int = Field(default=200, ge=1)
    """Stop with the reason when this many groups in a row give nothing to train (all rewards equal, all failed)."""
    max_freeze_s: float = Field(default=60.0, gt=0)
    """An event loop that stands still for longer (environment code that blocks it) ends the process. It is started again without the
    tasks that it was at; see docs/environments.md."""
    infra_retries: int = Field(default=1, ge=0)
    """Fresh rollouts issued in place of one that ended as infra_error, before its group goes on without it."""


class CheckpointConfig(Section):
    """Checkpoints of the whole run, under one manifest."""

    interval: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = Field(default=2, ge=1)


class RunConfig(Section):
    """The run file of `slipstream rl`. Also read by `sft` and `eval`."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder under `runs_dir`."""
    runs_dir: Path = Path("runs")
    seed: int = Field(default=0, ge=0)
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    stop_at_eval: float | None = None
    """End early once an online evaluation (avg@k over all environments) reaches this."""
    max_minutes: float | None = Field(default=None, gt=0)
    """End early, with a last evaluation and checkpoint, at the first step after this much time since the start or the latest `--resume`."""
    model: ModelConfig
    engine: AnyEngine = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    router: RouterConfig = RouterConfig()
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    envs: tuple[EnvConfig, ...] = Field(min_length=1)
    eval: EvalConfig = EvalConfig()
    sft: SftConfig | None = None
    """Warm-up on the environments' demonstrations by `slipstream sft`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def folder(self) -> Path:
        return self.runs_dir / self.name

    @model_validator(mode="after")
    def _cross_checks(self):
        if unseated := self.cluster.seats(self.trainer.parallel.processes):
            raise ValueError(unseated)
        if self.trainer.row_tokens < self.model.seq_len:
            raise ValueError(
                f"trainer.row_tokens = {self.trainer.row_tokens} and model.seq_len = {self.model.seq_len}: "
                "a row must hold the longest sample, so row_tokens must be at least seq_len"
            )
        if self.stop_at_eval is not None and self.eval.tasks == 0:
            raise ValueError(f"stop_at_eval = {self.stop_at_eval} and eval.tasks = 0: without evaluation it can never be reached")
        labels = [env.label for env in self.envs]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"envs: two environments are named {label!r}; give one of them another `name`")
        if self.trainer.router_replay and not self.engine.capture_routing:
            raise ValueError(
                "trainer.router_replay = true and engine.capture_routing = false: replay needs the captured routes; change one of them"
            )
        for env in self.envs:
            if env.sampling.max_tokens >= self.model.seq_len:
                raise ValueError(
                    f"envs[{env.label}].sampling.max_tokens = {env.sampling.max_tokens} and model.seq_len = {self.model.seq_len}: "
                    "there is no room for a prompt; lower max_tokens or raise seq_len"
                )
            if env.group_size < self.orchestrator.min_group:
                raise ValueError(
                    f"envs[{env.label}].group_size = {env.group_size} and orchestrator.min_group = {self.orchestrator.min_group}: "
                    "every group would be dropped as too small"
                )
            if env.sampling.temperature == 0:
                raise ValueError(
                    f"envs[{env.label}].sampling.temperature = 0: greedy rollouts of a group are all the same; use a temperature above 0"
                )
        return self

    @model_validator(mode="after")
    def _engines_of_somebody_else(self):
        prefill = self.engine.disaggregation.prefill_replicas if isinstance(self.engine, EngineConfig) else 0
        if self.router.urls and prefill:
            raise ValueError(
                f"engine.disaggregation.prefill_replicas = {prefill} and router.urls = {list(self.router.urls)}: engines that somebody "
                "else runs have no roles, and every one of them prefills and decodes; leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _trainer_and_engine_round_alike(self):
        if self.trainer.publish == "float8" and self.engine.dtype != "float8":
            advice = 'set engine.dtype = "float8", or trainer.publish' if self.engine.type == "embedded" else "set trainer.publish"
            raise ValueError(
                f'trainer.publish = "float8" and engine.dtype = {self.engine.dtype!r}: the engine would sample from rounded weights '
                f'that it does not multiply in FP8; {advice} = "compute"'
            )
        quantises = self.trainer.dtype == "float8" or self.trainer.publish == "float8"
        ours = self.engine if isinstance(self.engine, EngineConfig) else None
        if ours is not None and quantises and ours.dtype == "float8" and ours.fp8_scales != self.trainer.fp8_scales:
            raise ValueError(
                f"trainer.fp8_scales = {self.trainer.fp8_scales!r} and engine.fp8_scales = {ours.fp8_scales!r}: trainer and engine "
                "would multiply different codes; set both to the same"
            )
        lower = self.trainer.dtype != "float32" and self.engine.dtype != "float32"
        if ours is not None and lower and self.trainer.head_dtype != ours.head_dtype:
            raise ValueError(
                f"trainer.head_dtype = {self.trainer.head_dtype!r} and engine.head_dtype = {ours.head_dtype!r}: one would round "
                "logits and the other not, so that they disagree about every token; set both to the same"
            )
        return self
