"""How far a run has come, to and from a checkpoint: everything that the next steps depend on, and nothing else.

The learning rate needs no state: it is a function of the step.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.trainer import checkpoint
from slipstream.trainer.checkpoint import Checkpoint
from slipstream.trainer.team import Team


@dataclass(frozen=True, slots=True)
class Progress:
    """What changes from step to step beside the weights and the moments."""

    step: int = 0
    """The last step trained."""
    bad_steps: int = 0
    """Skipped steps in a row up to now."""
    orchestrator_state: Mapping[str, Any] = field(default_factory=dict)
    """Of the batch of that step."""


def save(checkpoints: Path, team: Team, now: Progress, config_fingerprint: str) -> Checkpoint:
    """Write a verified checkpoint. Raises OSError, see `checkpoint.save`."""
    masters, moments = team.state()
    rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    return checkpoint.save(
        checkpoints,
        now.step,
        model=masters,
        optimizer=moments,
        state={"bad_steps": now.bad_steps, "max_steps": team.max_steps, "rng": rng},
        orchestrator_state=now.orchestrator_state,
        config_fingerprint=config_fingerprint,
    )


def load(team: Team, found: Checkpoint) -> Progress:
    """Put the learner where it was. Raises ModelError when the checkpoint is of another model."""
    team.restore(found)
    torch.set_rng_state(torch.tensor(np.frombuffer(base64.b64decode(found.state["rng"]), dtype=np.uint8)))
    return Progress(found.step, int(found.state["bad_steps"]), found.orchestrator_state)
