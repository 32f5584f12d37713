"""What the orchestrator keeps in the run folder besides the ledger: its lock, the rollouts of each step, and old weights to delete.

`Store` is the seam (slipstream.fakes has another one); `RunStore` is the real folder. Knows nothing of steps in progress.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.observe.rollouts import RolloutWriter
from slipstream.ports import Trainer
from slipstream.transport.files import naming
from slipstream.transport.weights import retire
from slipstream.types import Batch, Rollout


class Outbox(Trainer, Protocol):
    """A trainer whose `send` comes in two halves, so that the ledger can be written between them (transport.folder.FolderTrainer).

    A crash after `stage` and before the ledger: `discard`. After the ledger and before `release`: `release`.
    """

    async def stage(self, batch: Batch) -> None:
        """Make the batch durable where the trainer does not look yet. Replaces an earlier staging of the step."""
        ...

    async def release(self, step: int) -> None:
        """Let the trainer have it. Idempotent."""
        ...

    def staged(self) -> list[int]:
        """Steps that were staged and not released."""
        ...

    def discard(self, step: int) -> None: ...


class Store(Protocol):
    """Where rollouts go, and what deletes weights that nobody reads any more."""

    async def write_rollouts(
        self, step: int, rollouts: Sequence[Rollout], advantages: Mapping[str, float], dropped: Mapping[str, str]
    ) -> None:
        """All rollouts that ended since the step before, whatever became of them."""
        ...

    async def write_eval(self, version: int, rollouts: Sequence[Rollout]) -> None: ...

    async def retire_weights(self, oldest: int) -> None:
        """Delete versions older than `oldest`."""
        ...


class RunStore:
    """The run folder of a real run. Files are written in a thread: compression takes milliseconds that the loop should not lose."""

    def __init__(self, run_folder: Path):
        self._weights = run_folder / "weights"
        self._rollouts = run_folder / "rollouts"
        self._writer = RolloutWriter(run_folder)

    async def write_rollouts(
        self, step: int, rollouts: Sequence[Rollout], advantages: Mapping[str, float], dropped: Mapping[str, str]
    ) -> None:
        with naming(self._rollouts):
            await asyncio.to_thread(self._writer.write, step, rollouts, advantages=advantages, dropped=dropped)

    async def write_eval(self, version: int, rollouts: Sequence[Rollout]) -> None:
        with naming(self._rollouts):
            await asyncio.to_thread(self._writer.write_eval, version, rollouts)

    async def retire_weights(self, oldest: int) -> None:
        await asyncio.to_thread(retire, self._weights, oldest)


class FolderLock:
    """Held by the one orchestrator of a run folder for as long as its process lives; the kernel releases it whatever happens."""

    def __init__(self, run_folder: Path):
        """Raises ConfigError when another process holds it."""
        path = run_folder / "orchestrator.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 32, 0).decode().strip()
            os.close(self._file)
            raise ConfigError(
                f"two runs on one folder: {run_folder} is in use by the orchestrator with process id {owner or 'unknown'}. "
                "Wait for it, stop it, or give this run another `name`"
            ) from None
        os.ftruncate(self._file, 0)
        with naming(path):
            os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        os.close(self._file)
