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

from slipstream.errors import ModelError
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


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint that is being written while training goes on."""

    folder: Path
    now: Progress
    state: Mapping[str, Any]


def begin(checkpoints: Path, team: Team, now: Progress) -> Saving:
    """Copy everything as it is now, and begin to write it. Raises OSError: there is no room for the folder."""
    rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    folder = checkpoint.begin(checkpoints, now.step)
    team.save(folder)
    return Saving(folder, now, {"bad_steps": now.bad_steps, "max_steps": team.max_steps, "rng": rng, "family": team.family})


def finish(saving: Saving, team: Team, config_fingerprint: str) -> Checkpoint:
    """Waits for: the shards. Makes a checkpoint of them.

    Raises OSError (a full disk among others), of whichever process: nothing of the attempt is left, older checkpoints are as they were.
    """
    try:
        shards = team.saved()
        return checkpoint.commit(
            saving.folder, saving.now.step, shards, saving.state, saving.now.orchestrator_state, config_fingerprint=config_fingerprint
        )
    except BaseException:
        checkpoint.discard(saving.folder)
        raise


def save(checkpoints: Path, team: Team, now: Progress, config_fingerprint: str) -> Checkpoint:
    """`begin` and `finish`."""
    return finish(begin(checkpoints, team, now), team, config_fingerprint)


def load(team: Team, found: Checkpoint) -> Progress:
    """Put the learner where it was. Raises ModelError when the checkpoint is of another model."""
    family = found.state["family"]
    if family != team.family:
        raise ModelError(f"checkpoint {found.folder} is of the family {family!r}, but the model is of {team.family!r}")
    team.restore(found)
    torch.set_rng_state(torch.tensor(np.frombuffer(base64.b64decode(found.state["rng"]), dtype=np.uint8)))
    return Progress(found.step, int(found.state["bad_steps"]), found.orchestrator_state)
