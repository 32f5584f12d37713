"""Policy-gradient losses: one pure function each. Formulas, sources and advice on when to use which: docs/algorithms.md.

Notation: `T` tokens of one packed row. The *ratio* of a token is p_train / p_engine: the trainer's probability of the token under
the weights being trained over the probability that the engine sampled it with. No policy is recomputed in between, so the same
ratio corrects for staleness and for engine-trainer mismatch alike.

Every loss takes the same five arrays and, by keyword, the fields of its config section; each returns a loss per token *before*
normalisation. The trainer sums over all rows of the batch and divides by the global number of loss tokens, so that a token
weighs the same whatever row, rank or gradient-accumulation step it lands in.

What this module does not know: models, batches, optimizers, where the logprobs came from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.algorithms.custom import import_function
from slipstream.config.train import CustomLoss, LossConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this band before exp, so that one broken token cannot make the loss infinite (verl rollout correction)."""


class LossOutput(NamedTuple):
    """What a loss says about each token."""

    loss_T: Tensor
    """Loss before normalisation; exactly 0 where the loss mask is False."""
    masked_T: Tensor
    """True for trainable tokens whose policy-gradient term the algorithm itself dropped."""


LossFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], LossOutput]
"""(logprobs_T, engine_logprobs_T, advantages_T, mask_T, sample_T) -> LossOutput."""


def loss_fn(config: LossConfig) -> LossFn:
    """The loss that the run file asks for, with its parameters bound.

    Raises ConfigError: a custom path cannot be imported.
    """
    if isinstance(config, CustomLoss):
        return partial(import_function(config.path, "trainer.loss.path"), **config.args)
    return partial(LOSSES[config.type], **config.model_dump(exclude={"type"}))


def dppo(
    logprobs_T: Tensor,
    engine_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    *,
    tv_threshold: float,
    kl_coef: float,
) -> LossOutput:
    """DPPO with the binary total-variation mask: -A * ratio * keep + kl_coef * (log ratio)^2.

    A token is dropped once its probability has already moved further than `tv_threshold` the way its advantage pushes. The squared
    log-ratio pulls every trainable token back, dropped ones too. Sources: arXiv 2602.04879; prime-rl v0.6.0 loss.py.
    """
    log_ratio_T = _log_ratio(logprobs_T, engine_logprobs_T, mask_T)
    moved_T = (logprobs_T.exp() - engine_logprobs_T.exp()).detach()
    pushed_up_T = (advantages_T > 0) & (moved_T > tv_threshold)
    pushed_down_T = (advantages_T < 0) & (moved_T < -tv_threshold)
    masked_T = mask_T & (pushed_up_T | pushed_down_T)
    gain_T = advantages_T * log_ratio_T.exp() * ~masked_T
    return _output(kl_coef * log_ratio_T.square() - gain_T, mask_T, masked_T)


def ppo(
    logprobs_T: Tensor,
    engine_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """PPO-clip: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A); with group advantages, GRPO. arXiv 1707.06347, 2402.03300."""
    ratio_T = _log_ratio(logprobs_T, engine_logprobs_T, mask_T).exp()
    loss_T, masked_T = _clipped(ratio_T, advantages_T, clip_low, clip_high)
    return _output(loss_T, mask_T, mask_T & masked_T)


def cispo(
    logprobs_T: Tensor,
    engine_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    *,
    clip_low: float | None,
    clip_high: float,
) -> LossOutput:
    """CISPO: -sg(clip(ratio, 1 - low, 1 + high)) * A * log p. Every token keeps a gradient. arXiv 2506.13585, 2510.13786."""
    ratio_T = _log_ratio(logprobs_T, engine_logprobs_T, mask_T).exp().detach()
    weight_T = ratio_T.clamp(min=None if clip_low is None else 1 - clip_low, max=1 + clip_high)
    return _output(-weight_T * advantages_T * logprobs_T, mask_T, torch.zeros_like(mask_T))


def icepop(
    logprobs_T: Tensor,
    engine_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    *,
    low: float,
    high: float,
) -> LossOutput:
    """IcePop: -A * ratio where low <= ratio <= high, else 0. arXiv 2510.18855."""
    ratio_T = _log_ratio(logprobs_T, engine_logprobs_T, mask_T).exp()
    masked_T = mask_T & _outside(ratio_T, low, high)
    return _output(-advantages_T * ratio_T * ~masked_T, mask_T, masked_T)


def gspo(
    logprobs_T: Tensor,
    engine_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """GSPO: PPO-clip on the sequence ratio s = exp(mean log ratio over the sample's trainable tokens). arXiv 2507.18071.

    Each trainable token carries the clipped objective of its sample, so a sample of n tokens adds n times the sequence loss and,
    after the division by the global token count, each *token* weighs the same, as with every other loss here. (The paper
    averages over sequences: a token of a long sequence then weighs less.) A sample never spans two rows, so the mean is complete.
    """
    log_ratio_T = _log_ratio(logprobs_T, engine_logprobs_T, mask_T)
    ratio_T = _sample_mean(log_ratio_T, mask_T, sample_T).exp()
    loss_T, masked_T = _clipped(ratio_T, advantages_T, clip_low, clip_high)
    return _output(loss_T, mask_T, mask_T & masked_T)


def policy_gradient(
    logprobs_T: Tensor,
    engine_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    *,
    correction: str,
    tis_cap: float,
    mis_low: float,
    mis_high: float,
) -> LossOutput:
    """-w * A * log p. none: w = 1. tis: w = sg(min(ratio, cap)). mis: w = sg(ratio) where low <= ratio <= high, else 0.

    Sources: REINFORCE; truncated importance sampling as in verl's rollout correction; masked importance sampling as in slime.
    """
    ratio_T = _log_ratio(logprobs_T, engine_logprobs_T, mask_T).exp().detach()
    masked_T = torch.zeros_like(mask_T)
    if correction == "none":
        weight_T = torch.ones_like(ratio_T)
    elif correction == "tis":
        weight_T = ratio_T.clamp(max=tis_cap)
    else:
        masked_T = mask_T & _outside(ratio_T, mis_low, mis_high)
        weight_T = ratio_T * ~masked_T
    return _output(-weight_T * advantages_T * logprobs_T, mask_T, masked_T)


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "dppo": dppo,
    "ppo": ppo,
    "cispo": cispo,
    "icepop": icepop,
    "gspo": gspo,
    "policy_gradient": policy_gradient,
}
"""By the `type` of their config section, whose other fields are their keyword arguments."""


def k3(logprobs_T: Tensor, engine_logprobs_T: Tensor) -> Tensor:
    """Mismatch KL of each token: ratio - 1 - log ratio (Schulman's k3 estimator of KL(engine || trainer)).

    expm1 keeps it from going below 0 where the ratio is 1 up to rounding, which is where a run should be.
    """
    log_ratio_T = (logprobs_T - engine_logprobs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(log_ratio_T) - log_ratio_T


def _log_ratio(logprobs_T: Tensor, engine_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """log(p_train / p_engine), clamped; 0 without gradient on tokens that are not trained, whatever their logprobs are."""
    log_ratio_T = torch.where(mask_T, logprobs_T - engine_logprobs_T, 0.0)
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic objective as a loss, and where the clip took the gradient away."""
    gain_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(1 - low, 1 + high) * advantages_T)
    clipped_T = ((advantages_T > 0) & (ratio_T > 1 + high)) | ((advantages_T < 0) & (ratio_T < 1 - low))
    return -gain_T, clipped_T


def _outside(ratio_T: Tensor, low: float, high: float) -> Tensor:
    return (ratio_T < low) | (ratio_T > high)


def _sample_mean(values_T: Tensor, mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """Per token, the mean over its sample's trainable tokens of `values_T`, which are 0 elsewhere. A sample without any has mean 0."""
    ids, segment_T = torch.unique(sample_T, return_inverse=True)
    zeros = values_T.new_zeros(len(ids))
    sums = zeros.index_add(0, segment_T, values_T)
    counts = zeros.index_add(0, segment_T, mask_T.to(values_T.dtype))
    return (sums / counts.clamp(min=1))[segment_T]


def _output(loss_T: Tensor, mask_T: Tensor, masked_T: Tensor) -> LossOutput:
    return LossOutput(torch.where(mask_T, loss_T, 0.0), masked_T)
