"""Advantages: how the rewards of a group become learning signals. Pure numpy, no torch; formulas and sources in docs/algorithms.md.

`S` rollouts of one group, only the gradable ones: a partial group has the baseline of the members that it has, and a member that
failed for reasons of infrastructure has none. The advantage of a rollout is laid on each of its trainable tokens by the caller.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.algorithms.custom import import_function
from slipstream.config.train import AdvantageConfig
from slipstream.errors import ConfigError, StateError
from slipstream.types import FloatArray, IntArray

Rewards = np.ndarray
"""float64, so that rewards which are equal stay equal."""

STD_EPS = 1e-6
"""Added to the standard deviation, as in verl's compute_grpo_outcome_advantage."""


def compute(config: AdvantageConfig, rewards_S: FloatArray, lengths_S: IntArray, seq_len: int) -> FloatArray:
    """Advantages of one group's gradable rollouts.

    `lengths_S`: sampled tokens of each rollout; `seq_len`: the model's limit, the unit of the length penalty. All rewards equal (after
    the penalty), or a group of one: all zeros, for every estimator but a custom one.
    Raises StateError: a reward is not finite. ConfigError: a custom function cannot be imported or returns another shape.
    """
    rewards = np.asarray(rewards_S, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise StateError(f"rewards of a group are not finite: {rewards.tolist()}; such a rollout must end as reward_error")
    pass_rate = _pass_rate(rewards)
    rewards = rewards - config.length_penalty * pass_rate * np.asarray(lengths_S, dtype=np.float64) / seq_len
    if config.type == "custom":
        return _custom(config.path or "", rewards, lengths_S, pass_rate)
    if len(rewards) < 2 or rewards.min() == rewards.max():
        return np.zeros(len(rewards), dtype=np.float32)
    return ESTIMATORS[config.type](rewards).astype(np.float32)


def group_mean(rewards: Rewards) -> Rewards:
    """A = r - mean. Unbiased up to the factor (n - 1) / n; no division by the spread. Dr. GRPO (arXiv 2503.20783); prime-rl v0.6.0."""
    return rewards - rewards.mean()


def group_std(rewards: Rewards) -> Rewards:
    """A = (r - mean) / (std + eps) with the population standard deviation. GRPO (arXiv 2402.03300)."""
    return (rewards - rewards.mean()) / (rewards.std() + STD_EPS)


def rloo(rewards: Rewards) -> Rewards:
    """A = r - mean of the *other* members = (r - mean) * n / (n - 1). REINFORCE leave-one-out (arXiv 2402.14740)."""
    n = len(rewards)
    return (rewards - rewards.mean()) * n / (n - 1)


def maxrl(rewards: Rewards) -> Rewards:
    """A = (r - mean) / mean where mean > 0, else 0: hard tasks weigh as much as maximum likelihood would. MaxRL (arXiv 2602.02710).

    Meant for rewards of 0 or 1. Rewards below 0 can bring the mean near 0 and so make advantages very large.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


ESTIMATORS: dict[str, Callable[[Rewards], Rewards]] = {
    "group_mean": group_mean,
    "group_std": group_std,
    "rloo": rloo,
    "maxrl": maxrl,
}
"""By `AdvantageConfig.type`."""


def _pass_rate(rewards: Rewards) -> float:
    """Mean reward before any penalty, held to 0..1: the length penalty grows with how well the task is solved already."""
    return float(rewards.mean().clip(0, 1)) if len(rewards) else 0.0


def _custom(path: str, rewards: Rewards, lengths_S: IntArray, pass_rate: float) -> FloatArray:
    advantages = np.asarray(import_function(path, "advantage.path")(rewards, lengths_S, pass_rate), dtype=np.float32)
    if advantages.shape != rewards.shape:
        raise ConfigError(f"advantage.path = {path!r}: returned shape {advantages.shape}; expected {rewards.shape}, one for each rollout")
    return advantages
