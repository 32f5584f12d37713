"""The processes of a trainer, led by the first one: it alone reads batches, decides, publishes and commits checkpoints; the others do
what it says, because stepping, gathering weights and writing checkpoints take all of them.

    leader:    with Team(learner) as team: team.step(batch); team.published(); ...
    followers: follow(learner)             until the leader leaves its block

One process alone leads nobody, and nothing is sent.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slipstream.errors import StateError
from slipstream.models.lora import Adapters
from slipstream.models.tensor_file import Items, TensorStream
from slipstream.parallel.pieces import boxes
from slipstream.trainer.checkpoint import Checkpoint
from slipstream.trainer.shards import ShardWriter, Stored, shard_name, stage
from slipstream.trainer.step import Learner, StepOutcome
from slipstream.transport.codec import decode_batch, encode_batch
from slipstream.types import Batch

_STEP, _PUBLISHED, _SAVE, _SAVED, _RESTORE, _END = b"s", b"p", b"w", b"d", b"r", b"e"


class Member:
    """What a process does of what the leader asks for."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.mesh = learner, learner.mesh
        self.writer = ShardWriter()

    def save(self, folder: Path) -> None:
        """Copy what this process writes, and write it while training goes on."""
        held = self.learner.state()
        staged = stage(held, boxes(held, self.mesh), self.mesh.rank)
        self.writer.start(folder / shard_name(self.mesh.rank), staged)

    def saved(self) -> dict[str, dict[str, Any]]:
        """Waits for: the shards of all processes. File to manifest entry. Raises what the first process that failed has raised."""
        found = self.mesh.exchange(self.writer.outcome())
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return {shard_name(rank): outcome for rank, outcome in enumerate(found) if not isinstance(outcome, BaseException)}


class Team:
    """What the leader calls; every method is one that all processes run."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._mesh, self._member = learner, learner.mesh, Member(learner)

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

    @property
    def family(self) -> str:
        """Of the model."""
        return self._learner.weights.master.spec.family

    def step(self, batch: Batch) -> StepOutcome:
        if not self._mesh.alone:
            self._mesh.tell(b"".join([_STEP, *encode_batch(batch)]))
        return self._learner.step(batch)

    def published(self) -> TensorStream:
        """See `Learner.published`. The others begin to send when the first tensor is asked for."""
        found = self._learner.published()

        def items() -> Items:
            self._mesh.tell(_PUBLISHED)
            yield from found.items()

        return TensorStream(found.kinds, items)

    def save(self, folder: Path) -> None:
        """Begin to write the shards of a checkpoint into `folder`; `saved` ends it. Nothing but memory is waited for."""
        self._mesh.tell(_SAVE + str(folder).encode())
        self._member.save(folder)

    @property
    def saving(self) -> bool:
        """Whether the leading process still writes."""
        return self._member.writer.busy

    def saved(self) -> dict[str, dict[str, Any]]:
        """See `Member.saved`."""
        self._mesh.tell(_SAVED)
        return self._member.saved()

    def restore(self, found: Checkpoint) -> None:
        """Raises ModelError when the checkpoint is of another model. Every process reads what it keeps."""
        self._mesh.tell(_RESTORE + str(found.folder).encode())
        self._learner.restore(found.tensors())


def follow(learner: Learner) -> None:
    """Waits for: the leader's next word. Returns when it leaves."""
    member = Member(learner)
    while True:
        message = learner.mesh.hear()
        word, rest = message[:1], message[1:]
        if word == _STEP:
            learner.step(decode_batch(rest))
        elif word == _PUBLISHED:
            for name, _ in learner.published().items():
                raise StateError(f"tensor {name} came to a trainer process that does not lead")
        elif word == _SAVE:
            member.save(Path(rest.decode()))
        elif word == _SAVED:
            with contextlib.suppress(OSError):  # the leader decides what that means
                member.saved()
        elif word == _RESTORE:
            learner.restore(Stored(Path(rest.decode())))
        elif word == _END:
            return
        else:
            raise StateError(f"the leading trainer process said {message[:20]!r}, which no other one understands")
