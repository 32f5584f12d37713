"""[[envs]] and [eval]: what to practise on, and what to measure."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from slipstream.config.base import Section
from slipstream.config.serve import SamplingConfig
from slipstream.config.train import AdvantageConfig


class EnvConfig(Section):
    """One environment of the run."""

    id: str
    """'reverse-text', 'constraints', 'calculator', 'calculator-agent', or 'package.module:Class' for your own."""
    name: str | None = None
    """Name in metrics and rollouts; the id when left out. Must be unique within the run."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups that this environment gets, relative to the others' weights."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task."""
    max_turns: int = Field(default=8, ge=1)
    """Engine calls in one rollout; beyond that it is truncated."""
    max_rollout_tokens: int | None = Field(default=None, ge=1)
    """Cap on the tokens sampled in one rollout, over all turns."""
    turn_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one engine call or one environment hook (tool, score)."""
    rollout_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of a whole rollout. Past it the rollout is cut; its group may close without it."""

    @property
    def label(self) -> str:
        return self.name or self.id


class EvalConfig(Section):
    """Online evaluation on held-out tasks, pinned to one policy version, beside training."""

    interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    tasks: int = Field(default=64, ge=0)
    """Held-out tasks of each environment; 0 turns evaluation off."""
    samples: int = Field(default=1, ge=1)
    """Rollouts per task (k of avg@k and pass@k)."""
    temperature: float = Field(default=0.0, ge=0)
    skip_first: bool = False
    """Do not evaluate version 0."""
    success_reward: float = 1.0
    """A rollout counts as a success from this reward on."""
