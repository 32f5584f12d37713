"""The processes of a trainer, led by the first one: it alone reads batches, decides, publishes and writes checkpoints; the others do
what it says, because stepping and gathering weights take all of them.

    leader:    with Team(learner) as team: team.step(batch); team.published(); ...
    followers: follow(learner)             until the leader leaves its block

One process alone leads nobody, and nothing is sent.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from slipstream.errors import StateError
from slipstream.models.lora import Adapters
from slipstream.trainer import checkpoint
from slipstream.trainer.checkpoint import Checkpoint
from slipstream.trainer.step import Learner, StepOutcome
from slipstream.transport.codec import decode_batch, encode_batch
from slipstream.types import Batch

_STEP, _PUBLISHED, _STATE, _RESTORE, _END = b"s", b"p", b"c", b"r", b"e"


class Team:
    """What the leader calls; every method is one of the learner's, run by all processes."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._mesh = learner, learner.mesh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Lets the followers go, also after an error of the leader's own."""
        with contextlib.suppress(RuntimeError) if error is not None else contextlib.nullcontext():
            self._mesh.tell(_END)

    @property
    def max_steps(self) -> int:
        return self._learner.max_steps

    @property
    def adapters(self) -> Adapters | None:
        """See `Learner.adapters`."""
        return self._learner.adapters

    def step(self, batch: Batch) -> StepOutcome:
        if not self._mesh.alone:
            self._mesh.tell(_STEP + encode_batch(batch))
        return self._learner.step(batch)

    def published(self) -> dict[str, Tensor]:
        """See `Learner.published`."""
        self._mesh.tell(_PUBLISHED)
        return self._learner.published()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(masters, moments): what a checkpoint stores."""
        self._mesh.tell(_STATE)
        return self._learner.masters(), self._learner.moments()

    def restore(self, found: Checkpoint) -> None:
        """Raises ModelError when the checkpoint is of another model. Every process reads the files."""
        self._mesh.tell(_RESTORE + str(found.folder).encode())
        self._learner.restore(found.model_tensors(), found.optimizer_tensors())


def follow(learner: Learner) -> None:
    """Waits for: the leader's next word. Returns when it leaves."""
    while True:
        message = learner.mesh.hear()
        word, rest = message[:1], message[1:]
        if word == _STEP:
            learner.step(decode_batch(rest))
        elif word == _PUBLISHED:
            learner.published()
        elif word == _STATE:
            learner.masters(), learner.moments()
        elif word == _RESTORE:
            found = checkpoint.read(Path(rest.decode()))
            learner.restore(found.model_tensors(), found.optimizer_tensors())
        elif word == _END:
            return
        else:
            raise StateError(f"the leading trainer process said {message[:20]!r}, which no other one understands")
