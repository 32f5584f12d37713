"""Rollouts between their end and their batch: what is ready, what was let go and why, and the ledger's entries for both.

Decisions come from pure functions (groups.judge, staleness.sweep, staleness.cut); this only carries them out, in one place, so that
queue and ledger cannot disagree. Synchronous: nothing here waits.
"""

from __future__ import annotations

from collections import Counter

from slipstream.config.run import OrchestratorConfig
from slipstream.orchestrator.groups import Verdict
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.staleness import Ready, as_ready, cut, size, sweep
from slipstream.types import Rollout

_MEAN_RATE = 0.1
"""Weight of the newest rollout in the running mean of tokens."""


class ReadyQueue:
    """Bounded by what may be issued (staleness.room): it needs no limit of its own."""

    def __init__(self, config: OrchestratorConfig, ledger: Ledger, seq_len: int):
        self.items: list[Ready] = []
        self.caught: Counter[str] = Counter()
        """Rollouts that each filter caught."""
        self._config = config
        self._ledger = ledger
        self._closed: list[Rollout] = []
        self._fate: dict[str, str] = {}
        self._tokens_each = float(seq_len)  # at first as many as there can be, so that token batches are not over-issued

    def ended(self, rollout: Rollout, draining: bool) -> None:
        """A rollout has ended; if it has a reward, it waits for its group."""
        self._closed.append(rollout)
        if rollout.outcome.gradable:
            self._ledger.ready(rollout.id, rollout.outcome, rollout.reward, rollout.num_sampled)
        else:
            reason = "drained" if draining else rollout.outcome.value
            self._ledger.drop(rollout.id, reason, rollout.outcome, rollout.num_sampled)
            self._fate[rollout.id] = reason

    def admit(self, env: str, verdict: Verdict) -> None:
        """The verdict on a closed group."""
        self.caught.update(verdict.caught)
        for id, reason in verdict.dropped.items():
            self._drop(id, reason)
        for rollout, advantage in verdict.trained:
            item = as_ready(env, rollout, advantage)
            if item is None:
                self._drop(rollout.id, "empty")
            else:
                self.items.append(item)
                self._tokens_each += _MEAN_RATE * (sum(s.num_tokens for s in item.samples) - self._tokens_each)

    def sweep(self, step: int) -> None:
        """Let go of what batch `step` may not train any more."""
        settings = self._config
        self.items, stale = sweep(self.items, step, settings.max_off_policy_steps, settings.stale == "mask")
        for item in stale:
            self._drop(item.rollout_id, "stale")

    @property
    def has_batch(self) -> bool:
        return cut(self.items, self._config.batch) is not None

    def cut(self) -> list[Ready] | None:
        """Take the rollouts of one batch, if there are enough."""
        found = cut(self.items, self._config.batch)
        if found is None:
            return None
        taken, self.items = found
        return taken

    def outstanding(self, num_playing: int) -> float:
        """Samples or tokens that are issued and not shipped: `num_playing` rollouts at their mean size, and what is ready."""
        each = 1.0 if self._config.batch.type == "samples" else self._tokens_each
        return num_playing * each + sum(size(item, self._config.batch) for item in self.items)

    def take_closed(self) -> tuple[list[Rollout], dict[str, str]]:
        """Everything that ended since the last call, and by id why it was dropped."""
        closed, fate = self._closed, self._fate
        self._closed, self._fate = [], {}
        return closed, fate

    def _drop(self, rollout_id: str, reason: str) -> None:
        self._ledger.drop(rollout_id, reason)
        self._fate[rollout_id] = reason
