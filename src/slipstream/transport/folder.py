"""Batches and policy versions between orchestrator and trainer through the run folder.

    batches/step_000012.batch   one file a step, written under a temporary name, fsynced, renamed
    batches/finish.json         no batch comes after `last_step`
    weights/v000012/            published by the trainer (see transport.weights)
    metrics.jsonl               the trainer's step reports, among the lines of everybody else

A file has its final name only when it is whole, so both sides poll for exact names and never lock. Polling every few milliseconds
costs microseconds; on the orchestrator's side it uses asyncio time only. Knows nothing of training or of the ledger.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import StateError, TrainerError, WireError
from slipstream.observe.metrics import MetricsTail, Record
from slipstream.transport.codec import decode_batch, encode_batch
from slipstream.transport.files import publish_file, temp_path, write_atomically, write_durably
from slipstream.transport.weights import list_versions, read_version, version_folder
from slipstream.types import Batch, PolicyVersion, StepReport

POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Finish:
    """No further batch will come."""

    reason: str


def batch_path(run_folder: Path, step: int) -> Path:
    return run_folder / "batches" / f"step_{step:06d}.batch"


def list_batches(run_folder: Path) -> list[int]:
    """Steps whose batch is on disk, ascending."""
    return sorted(int(path.stem.removeprefix("step_")) for path in (run_folder / "batches").glob("step_*.batch"))


class FolderTrainer:
    """The orchestrator's end: implements `ports.Trainer`. One writer per run folder.

    `send` is `stage` + `release`. A caller that must commit something of its own between the two (the ledger) calls them itself, and
    after a crash either releases or discards what `staged` lists.
    """

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._last_step = 0
        (run_folder / "batches").mkdir(parents=True, exist_ok=True)

    async def send(self, batch: Batch) -> None:
        await self.stage(batch)
        await self.release(batch.step)

    async def stage(self, batch: Batch) -> None:
        """Write the batch durably under a name that the trainer does not look for. Replaces an earlier staging of the step."""
        path = batch_path(self._run_folder, batch.step)
        if path.exists():
            raise StateError(f"batch of step {batch.step} was sent already ({path}); a step is sent once")
        await asyncio.to_thread(lambda: write_durably(temp_path(path), *encode_batch(batch)))

    async def release(self, step: int) -> None:
        """Let the trainer see a staged batch. Idempotent: it may have been released just before a crash."""
        path = batch_path(self._run_folder, step)
        if temp_path(path).exists():
            await asyncio.to_thread(publish_file, temp_path(path), path)
        elif not path.exists():
            raise StateError(f"batch of step {step} was neither staged nor sent: {path} does not exist")
        self._last_step = max(self._last_step, step)

    def staged(self) -> list[int]:
        """Steps that were staged but not released, ascending (what a crash between the two leaves)."""
        return sorted(int(path.name.split("step_")[1][:6]) for path in (self._run_folder / "batches").glob(".tmp-step_*.batch"))

    def discard(self, step: int) -> None:
        """Remove a staged batch."""
        temp_path(batch_path(self._run_folder, step)).unlink(missing_ok=True)

    async def finish(self, reason: str) -> None:
        last = max([self._last_step, *list_batches(self._run_folder)])
        text = json.dumps({"reason": reason, "last_step": last})
        await asyncio.to_thread(write_atomically, self._run_folder / "batches" / "finish.json", text.encode())

    def updates(self, after: int) -> Updates:
        return Updates(self._run_folder / "weights", after)

    def reports(self, after: int) -> Reports:
        return Reports(self._run_folder, after)


class Updates:
    """Newest policy version above `after`, again and again. Waits for the trainer's publish; never ends by itself.

    An iterator object and not an async generator: a generator that is cancelled while it waits (by the caller's deadline) is finished.
    """

    def __init__(self, weights: Path, after: int) -> None:
        self._weights = weights
        self._after = after

    def __aiter__(self) -> Updates:
        return self

    async def __anext__(self) -> PolicyVersion:
        while True:
            newest = max(list_versions(self._weights), default=-1)
            if newest > self._after:
                version = read_version(version_folder(self._weights, newest))
                self._after = newest
                return version
            await asyncio.sleep(POLL_S)


class Reports:
    """Step reports above `after`, in order, each step once; waits for the trainer's lines in metrics.jsonl; never ends by itself."""

    def __init__(self, run_folder: Path, after: int) -> None:
        self._tail = MetricsTail(run_folder)
        self._after = after
        self._ready: deque[StepReport] = deque()

    def __aiter__(self) -> Reports:
        return self

    async def __anext__(self) -> StepReport:
        while not self._ready:
            for record in self._tail.poll():
                self._take(record)
            if not self._ready:
                await asyncio.sleep(POLL_S)
        return self._ready.popleft()

    def _take(self, record: Record) -> None:
        """The line with the loss is the report of a step (not that of its checkpoint); a step trained again is reported once."""
        is_report = record["kind"] == "metrics" and record["role"] == "trainer" and "trainer/loss/mean" in record["values"]
        if is_report and record["step"] > self._after:
            self._ready.append(StepReport(record["step"], record["values"]))
            self._after = record["step"]


class FolderInbox:
    """The trainer's end: the next batch, or the word that none will come."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder

    def next(self, step: int, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> Batch | Finish | None:
        """The batch of `step`; waits for the orchestrator's `release`. None when `stopped` says so while waiting.

        Raises TrainerError after `timeout_s` without one, WireError when the file is damaged or holds another step.
        """
        path, deadline = batch_path(self._run_folder, step), time.monotonic() + timeout_s
        while not path.exists():
            finish = self._finish(step)
            if finish is not None or stopped():
                return finish
            if time.monotonic() > deadline:
                raise TrainerError(
                    f"no batch for step {step} within {timeout_s:g} s ({path}): the orchestrator is stuck or gone; "
                    "see its log, or raise trainer.batch_timeout_s"
                )
            time.sleep(POLL_S / 2)
        try:
            batch = decode_batch(path.read_bytes())
        except WireError as error:
            raise WireError(f"{path}: {error}") from None
        if batch.step != step:
            raise WireError(f"{path} holds the batch of step {batch.step}; expected step {step}")
        return batch

    def _finish(self, step: int) -> Finish | None:
        path = self._run_folder / "batches" / "finish.json"
        if not path.exists():
            return None
        values = json.loads(path.read_bytes())
        return Finish(values["reason"]) if step > values["last_step"] else None
