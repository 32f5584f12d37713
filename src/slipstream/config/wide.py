"""[engine.ep]: wide expert parallelism, engine processes that share the experts of one model. The picture is in docs/wide-ep.md."""

from __future__ import annotations

from pydantic import Field, model_validator

from slipstream.config.base import Section


class WideConfig(Section):
    """A group of `ranks` engine processes: each has its own requests, attention and KV cache, and some of the experts of every layer."""

    ranks: int = Field(default=1, ge=1)
    """Engine processes that share the experts; divides engine.replicas. 1: every process has all experts."""
    redundant_experts: int = Field(default=0, ge=0)
    """More places for experts in each process than an even share needs: for copies of those that are chosen most."""
    rebalance_steps: int = Field(default=512, ge=0)
    """Steps after which experts may be placed anew, by how often each was chosen meanwhile; 0: they stay where they were loaded."""
    rebalance_gain: float = Field(default=0.1, ge=0, lt=1)
    """Place them anew only when that lowers the imbalance (load of the busiest process over the mean) by at least this share."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long a process waits for the others, in a step or to commit a policy version together; afterwards the group ends and is started
    again, or the commit is refused."""

    @model_validator(mode="after")
    def _cross_checks(self):
        if self.redundant_experts and self.ranks == 1:
            raise ValueError(
                f"engine.ep.redundant_experts = {self.redundant_experts} and engine.ep.ranks = 1: one process has all experts already; "
                "raise ranks or leave redundant_experts out"
            )
        return self
