"""The orchestrator's numbers of one step: pure functions from what ended and what was shipped to metric keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.orchestrator.staleness import Ready
from slipstream.types import Rollout


def reward_metrics(closed: Sequence[Rollout], success_reward: float) -> dict[str, float]:
    """Reward and success over every rollout with a reward that ended since the last step, whether or not it is trained.

    Filters take out what teaches nothing (groups that are all right or all wrong), so the rewards of a batch say little about the policy.
    """
    rewards = [(rollout.task.env, rollout.reward) for rollout in closed if rollout.reward is not None]
    values = {"orchestrator/reward/mean": _mean([reward for _, reward in rewards])} if rewards else {}
    for env in sorted({env for env, _ in rewards}):
        own = [reward for name, reward in rewards if name == env]
        values[f"orchestrator/reward/{env}/mean"] = _mean(own)
        values[f"orchestrator/success/{env}/frac"] = _mean([reward >= success_reward for reward in own])
    return values


def batch_metrics(taken: Sequence[Ready], lags: Mapping[int, int]) -> dict[str, float]:
    """Lag and lengths of the rollouts of one batch. `lags`: loss tokens by lag."""
    tokens = max(sum(lags.values()), 1)
    return {
        "orchestrator/lag/mean": sum(lag * count for lag, count in lags.items()) / tokens,
        "orchestrator/lag/max": max(lags, default=0),
        "orchestrator/turns/mean": _mean([item.num_turns for item in taken]),
        "orchestrator/tokens/completion_mean": _mean([item.num_sampled for item in taken]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
