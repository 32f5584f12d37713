"""The orchestrator's numbers of one step: a pure function from what was shipped to metric keys (see slipstream.observe.registry)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.orchestrator.staleness import Ready


def batch_metrics(taken: Sequence[Ready], lags: Mapping[int, int], success_reward: float) -> dict[str, float]:
    """Reward, success, lag and lengths of the rollouts of one batch. `lags`: loss tokens by lag."""
    tokens = max(sum(lags.values()), 1)
    values = {
        "orchestrator/reward/mean": _mean([item.reward for item in taken]),
        "orchestrator/lag/mean": sum(lag * count for lag, count in lags.items()) / tokens,
        "orchestrator/lag/max": max(lags, default=0),
        "orchestrator/turns/mean": _mean([item.num_turns for item in taken]),
        "orchestrator/tokens/completion_mean": _mean([item.num_sampled for item in taken]),
    }
    for env in sorted({item.env for item in taken}):
        rewards = [item.reward for item in taken if item.env == env]
        values[f"orchestrator/reward/{env}/mean"] = _mean(rewards)
        values[f"orchestrator/success/{env}/frac"] = _mean([reward >= success_reward for reward in rewards])
    return values


def counted(prefix: str, counts: Mapping[str, float]) -> dict[str, float]:
    """{'prefix/name': count} for metric keys with a varying last part."""
    return {f"{prefix}/{name}": value for name, value in counts.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
