"""[trainer]: loss, advantage, optimizer, precision, packing. [sft]: the warm-up on demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from slipstream.config.base import Section
from slipstream.config.lora import LoraConfig
from slipstream.config.parallel import ParallelConfig

S = TypeVar("S", bound=Section)


def _check_band(section: S, loss: str, low_key: str, low: float, high_key: str, high: float) -> S:
    if low > high:
        raise ValueError(
            f"{loss}.{low_key} = {low} and {loss}.{high_key} = {high}: no ratio lies in that band, so nothing would be trained"
        )
    return section


# ---- losses: formulas and sources in docs/algorithms.md; one function each in slipstream.algorithms.losses ----


class DppoLoss(Section):
    """DPPO binary-TV mask plus a squared log-ratio term (arXiv 2602.04879; prime-rl v0.6.0 loss.py)."""

    type: Literal["dppo"] = "dppo"
    tv_threshold: float = Field(default=0.2, gt=0)
    """Mask a token when p_train - p_engine has left this band in the direction that its advantage pushes."""
    kl_coef: float = Field(default=1e-3, ge=0)
    """Weight of (log ratio)^2."""


class PpoLoss(Section):
    """PPO-clip on the ratio to the engine's logprobs; with group advantages this is GRPO."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)


class CispoLoss(Section):
    """CISPO: stop-gradient of the clipped ratio times A log pi (MiniMax-M1; ScaleRL arXiv 2510.13786)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float | None = None
    """None: no lower clip."""
    clip_high: float = Field(default=4.0, gt=0)
    """The ratio is clipped to at most 1 + clip_high."""


class IcePopLoss(Section):
    """IcePop: ratio where low <= ratio <= high, else 0 (arXiv 2510.18855)."""

    type: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, gt=0)
    high: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self):
        return _check_band(self, "icepop", "low", self.low, "high", self.high)


class GspoLoss(Section):
    """GSPO: one length-normalised sequence ratio, clipped per sequence."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0)
    clip_high: float = Field(default=4e-4, gt=0)


class PolicyGradientLoss(Section):
    """-A log pi, with an optional importance correction."""

    type: Literal["policy_gradient"] = "policy_gradient"
    correction: Literal["none", "tis", "mis"] = "none"
    """tis: weight min(ratio, cap). mis: weight ratio where mis_low <= ratio <= mis_high, else 0."""
    tis_cap: float = Field(default=2.0, gt=0)
    mis_low: float = Field(default=0.5, gt=0)
    mis_high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self):
        return _check_band(self, "policy_gradient", "mis_low", self.mis_low, "mis_high", self.mis_high)


class CustomLoss(Section):
    """A loss of your own: a function with the signature of those in slipstream.algorithms.losses."""

    type: Literal["custom"] = "custom"
    path: str
    """'package.module:function'"""
    args: dict[str, float | int | str | bool] = Field(default_factory=dict)


LossConfig = Annotated[
    DppoLoss | PpoLoss | CispoLoss | IcePopLoss | GspoLoss | PolicyGradientLoss | CustomLoss, Field(discriminator="type")
]


class AdvantageConfig(Section):
    """How the rewards of a group become advantages (slipstream.algorithms.advantages)."""

    type: Literal["group_mean", "group_std", "rloo", "maxrl", "custom"] = "group_mean"
    path: str | None = None
    """For type 'custom': 'package.module:function' taking (rewards_S, lengths_S, pass_rate) and returning advantages_S."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Subtract length_penalty * pass_rate * length / seq_len from each reward first (prime-rl v0.6.0)."""

    @model_validator(mode="after")
    def _path_goes_with_custom(self):
        if (self.type == "custom") != (self.path is not None):
            raise ValueError(
                f"advantage.type = {self.type!r} and advantage.path = {self.path!r}: a path goes with type 'custom', and only there"
            )
        return self


class OptimConfig(Section):
    """The optimizer and its schedule."""

    type: Literal["adamw", "muon", "sgd", "sign_sgd"] = "adamw"
    """muon: orthogonalised momentum for the matrices of attention, feed-forward layers and experts, AdamW for everything else."""
    lr: float = Field(default=1e-4, gt=0)
    """Muon's updates are scaled to the size of AdamW's, so a rate for AdamW serves both; sgd and sign_sgd need rates of their own."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Of AdamW, also within muon; so are beta2 and eps."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of muon, sgd and sign_sgd. 0 with sign_sgd: the sign of the gradient itself."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What moments and momentum are kept in between steps; bfloat16 halves their memory and is not bit-equal to float32."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; applied to matrices only (not to norms and biases)."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm after which gradients are scaled down."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or decay to lr * final_fraction at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _moments_can_fade(self):
        used = {"adamw": ("beta1", "beta2"), "muon": ("beta1", "beta2", "momentum")}.get(self.type, ("momentum",))
        for key in used:
            if self.moments == "bfloat16" and getattr(self, key) > 0.99:
                raise ValueError(
                    f"optim.{key} = {getattr(self, key)} with optim.moments = 'bfloat16': what should shrink by less than about 1 in 256 "
                    f"a step is rounded back and never fades; use {key} = 0.99 at most, or moments = 'float32'"
                )
        return self


class OffloadConfig(Section):
    """What the trainer keeps in files instead of in memory. They have no names and are gone with the process."""

    moments: bool = False
    """The optimizer's moments, between steps; a step works on one parameter at a time. AdamW is then our own, which rounds otherwise than
    torch's."""
    activations: bool = False
    """The inputs of layers, between forward and backward pass. Needs trainer.recompute = "layer"."""
    in_flight: int = Field(default=1, ge=1)
    """Layer inputs that may wait to be written before the forward pass waits for them."""
    folder: Path = Path("/var/tmp")
    """Where the files are; on a disk, not in memory as /tmp may be."""


class TrainerConfig(Section):
    """The trainer: one process, or several (trainer.parallel)."""

    dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    """Compute dtype. Master weights and their gradients are float32 in all of them. float8: bfloat16, with the matrices of attention and
    feed-forward layers multiplied in block-scaled FP8 (E4M3); emulated on the CPU, for its numbers and not for speed."""
    fp8_scales: Literal["float32", "power_of_two"] = "float32"
    """Of float8. power_of_two: scales rounded up to a power of two (as UE8M0 stores them), so that applying them is exact."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Of the product of hidden states and head. auto: the compute dtype, which rounds logits to it. float32: nothing is rounded between
    hidden states and logprobs (MiniMax-M1, arXiv 2506.13585, section 3.2, found this to be what set trainer and engine apart). Routers
    compute in float32 always."""
    publish: Literal["compute", "float8"] = "compute"
    """In what form engines get the weights. compute: in the compute dtype. float8: the matrices of the precision map as E4M3 codes with a
    float32 scale for each block of 128 x 128 (with `fp8_scales`), half the bytes of bfloat16; needs engine.dtype = "float8", which then
    multiplies these codes. What is exported at the end of a run is never quantised."""
    row_tokens: int = Field(default=4096, gt=0)
    """Tokens in a packed row (one micro-batch). A sample longer than this is a config error for model.seq_len above it."""
    logprob_chunk_tokens: int = Field(default=1024, gt=0)
    """Tokens whose logits exist at one time in the loss head; [tokens, vocabulary] is never materialised."""
    recompute: Literal["none", "feed_forward", "layer"] = "none"
    """What the backward pass computes again instead of keeping its activations. feed_forward: dense layers and experts, which keep the most
    and cost no attention. layer: everything; only the inputs of layers are kept."""
    offload: OffloadConfig = OffloadConfig()
    router_replay: bool = True
    """Force the engine's expert choices where they are known; gate weights stay the trainer's own."""
    freeze_router: bool = False
    balance_rate: float = Field(default=0.0, ge=0)
    """Loss-free balancing: size of the per-step bias update toward under-used experts (arXiv 2408.15664). 0: off."""
    aux_loss: float = Field(default=0.0, ge=0)
    """Weight of a loss that evens out the experts of each document (GShard, arXiv 2006.16668; Switch Transformer, arXiv 2101.03961), added
    for each MoE layer. It pulls at the router against the reward: 0, off, for RL."""
    loss: LossConfig = DppoLoss()
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig | None = None
    """Train adapters and leave the weights as they are, in RL and in [sft]."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Stop after this many consecutive steps with a non-finite loss or gradient. Each is skipped and its batch kept."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """Give up when no batch arrives for this long."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Of several trainer processes: give up when one waits for another for this long within a step."""
    threads: int = Field(default=1, ge=1)
    """OpenMP threads of each process."""
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _inputs_of_layers_are_kept(self):
        if self.offload.activations and self.recompute != "layer":
            raise ValueError(
                f"trainer.offload.activations = true and trainer.recompute = {self.recompute!r}: what is put away are the inputs of "
                'layers, from which the rest is computed again; set trainer.recompute = "layer"'
            )
        return self

    @model_validator(mode="after")
    def _adapters_alone_train(self):
        if self.lora is not None and self.balance_rate:
            raise ValueError(
                f"trainer.lora and trainer.balance_rate = {self.balance_rate}: loss-free balancing moves the routing bias, which no "
                "adapter holds; set balance_rate = 0, or leave [trainer.lora] out"
            )
        return self

    @model_validator(mode="after")
    def _codes_exist(self):
        if self.parallel.fp8_all_gather and self.dtype != "float8":
            raise ValueError(
                f"trainer.parallel.fp8_all_gather = true with trainer.dtype = {self.dtype!r}: there are no FP8 codes to send; set "
                "trainer.dtype = 'float8', or fp8_all_gather = false"
            )
        return self


class SftConfig(Section):
    """Supervised warm-up on an environment's own demonstrations."""

    steps: int = Field(default=200, ge=1)
    samples_per_step: int = Field(default=64, ge=1)
    num_demonstrations: int = Field(default=4096, ge=1)
    """Distinct training tasks to draw demonstrations from."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of demonstrations with a plausible mistake, as a cheap or weak demonstrator would make."""
    optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=20, schedule="cosine")
    log_every: int = Field(default=10, ge=1)
