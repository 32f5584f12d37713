"""The trainer role: receive a batch, step, publish the new policy version, checkpoint when due. One thread, no sockets.

Of several processes (`trainer.parallel`) the first one does all this; the others step and gather with it (`trainer.team`).

It waits for one thing only, the next batch in the run folder (woken by the orchestrator's rename), and says how long.
Knows nothing of rollouts, rewards or engines.
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch

from slipstream.config import RunConfig, load
from slipstream.errors import ModelError, TrainerError
from slipstream.models.fill import save_weights
from slipstream.models.fp8 import stream_in_fp8
from slipstream.models.impl import read_spec
from slipstream.models.peft import write_adapter
from slipstream.observe.metrics import MetricsWriter
from slipstream.parallel.mesh import joined
from slipstream.trainer import checkpoint, progress
from slipstream.trainer.publish import publish
from slipstream.trainer.step import StepOutcome, learner_of
from slipstream.trainer.team import Team, follow
from slipstream.transport.codec import encode_batch
from slipstream.transport.files import write_durably
from slipstream.transport.folder import Finish, FolderInbox, batch_path, list_batches
from slipstream.transport.weights import retire
from slipstream.types import Batch

HEARTBEAT_S = 5.0
KEPT_AGAIN = 4
"""Versions before the newest that stay while batches are trained again after a crash. They come as fast as the trainer can, and the
orchestrator, which retires versions otherwise, may be waiting for its engines meanwhile: a full disk would be the end."""
BETWEEN_S = 600.0
"""How long the leading process may be busy between two steps, beyond the wait for a batch."""


def main(run_folder: Path) -> int:
    """Train until the orchestrator says that no batch will come, or until SIGTERM. Returns the exit code.

    Raises TrainerError (no batch in time, too many bad steps), ModelError, ConfigError.
    """
    config = load(RunConfig, [run_folder / "config.toml"])
    torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.seed)
    with joined(config.trainer.parallel, config.trainer.stall_timeout_s, config.trainer.batch_timeout_s + BETWEEN_S) as mesh:
        learner = learner_of(config.model.path, config.trainer, config.trainer.optim, config.max_steps, mesh, impl=config.model.impl)
        if not mesh.leads:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader stops at a step boundary, and says so
            follow(learner)
            return 0
        with MetricsWriter(run_folder, "trainer") as metrics, Team(learner) as team:
            trainer = RlTrainer(run_folder, config, metrics, team)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
            trainer.run()
    return 0


class RlTrainer:
    """The loop: what it holds is a team of learners and how far the run has come."""

    def __init__(self, run_folder: Path, config: RunConfig, metrics: MetricsWriter, team: Team) -> None:
        self.run_folder, self.config, self.metrics, self.team = run_folder, config, metrics, team
        self.now = progress.Progress()
        self._inbox = FolderInbox(run_folder)
        self._saving: progress.Saving | None = None
        self._checkpointed = -1
        self._trained_before = 0
        """Up to here batches were there when the role began."""
        self._stopping = False
        self._waited_s = self._beat_s = self._begun_s = self._held_s = 0.0

    @property
    def step(self) -> int:
        """The last step trained, which is also the number of the current policy version."""
        return self.now.step

    def stop(self) -> None:
        """Checkpoint at the next step boundary and leave `run`. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Waits for: the batch of the next step. Woken by: its file, finish.json, or `stop`."""
        self._resume()
        self._publish()
        while not self._stopping:
            batch = self._receive()
            if not isinstance(batch, Batch):
                break
            self._train(batch)
            self._publish()
            if self.step < self._trained_before:
                retire(self.run_folder / "weights", self.step - KEPT_AGAIN)
            self._settle()
            if self.config.checkpoint.interval and self.step % self.config.checkpoint.interval == 0:
                self._checkpoint()
        self._settle(wait=True)
        if self._checkpointed != self.step:
            self._checkpoint(final=True)
        if not self._stopping:
            spec = read_spec(self.config.model.path, self.config.model.impl)
            save_weights(self.team.published(), spec, self.run_folder / "final", like=self.config.model.path)
            if self.team.adapters is not None:
                write_adapter(self.run_folder / "adapter", self.team.adapters, self.config.model.path)

    def _receive(self) -> Batch | Finish | None:
        with self._timed("wait_batch", self.step + 1) as timing:
            batch = self._inbox.next(self.step + 1, self.config.trainer.batch_timeout_s, stopped=self._poll)
        self._waited_s = timing["seconds"]
        return batch

    def _poll(self) -> bool:
        """Called every few milliseconds of waiting: a sign of life now and then, and the end of a checkpoint."""
        self._settle()
        if time.monotonic() > self._beat_s + HEARTBEAT_S:
            self._beat_s = time.monotonic()
            self.metrics.event("heartbeat", step=self.step)
        return self._stopping

    def _train(self, batch: Batch) -> None:
        with self._timed("step", batch.step) as timing:
            outcome = self.team.step(batch)
        bad_steps = self.now.bad_steps + 1 if outcome.problem else 0
        self.now = progress.Progress(batch.step, bad_steps, batch.orchestrator_state)
        times = {"trainer/time/step_s": timing["seconds"], "trainer/time/wait_batch_s": self._waited_s}
        memory = {"trainer/memory/rss_mib": psutil.Process().memory_info().rss / 2**20}
        self.metrics.log(batch.step, outcome.metrics | times | memory)
        if outcome.load_LE.size:
            self.metrics.event("expert_load", step=batch.step, load=np.round(outcome.load_LE, 5))
        if outcome.problem:
            self._skipped(batch, outcome)

    def _skipped(self, batch: Batch, outcome: StepOutcome) -> None:
        """Keep the batch of a skipped step. Raises TrainerError after `max_bad_steps` in a row."""
        kept = keep_bad_batch(self.run_folder, batch, outcome)
        self.metrics.event("step_skipped", step=batch.step, reason=outcome.problem, batch=str(kept))
        _warn(f"step {batch.step} skipped: {outcome.problem}; the batch is kept in {kept}")
        if self.now.bad_steps >= self.config.trainer.max_bad_steps:
            raise TrainerError(
                f"{self.now.bad_steps} steps in a row were skipped (trainer.max_bad_steps), the last because {outcome.problem}. "
                f"Their batches are in {kept.parent}; check rewards and logprobs there, or lower trainer.optim.lr"
            )

    def _publish(self) -> None:
        weights = self.run_folder / "weights"
        tensors, trainer = self.team.published(), self.config.trainer
        if trainer.publish == "float8":
            tensors = stream_in_fp8(tensors, trainer.fp8_scales == "power_of_two")
        with self._timed("publish", self.step) as timing:
            publish(weights, self.step, tensors, self.step - 1 if self.step else None)
        self.metrics.log(self.step, {"trainer/time/publish_s": timing["seconds"]})

    def _checkpoint(self, final: bool = False) -> None:
        """Begin one, which is written while training goes on; at the end of the run, wait for it. The one before is ended first."""
        self._settle(wait=True)
        self._begun_s = time.time()
        try:
            self._saving = progress.begin(self.run_folder / "checkpoints", self.team, self.now)
        except OSError as error:
            self._no_checkpoint(self.step, error, final)
        self._held_s = time.time() - self._begun_s
        if final:
            self._settle(wait=True, final=True)

    def _settle(self, wait: bool = False, final: bool = False) -> None:
        """End the checkpoint in flight, if there is one and it is written; `wait`: wait for that. Older ones go once it is there."""
        if self._saving is None or (self.team.saving and not wait):
            return
        saving, self._saving, began = self._saving, None, time.time()
        try:
            progress.finish(saving, self.team, self.config.fingerprint())
        except OSError as error:
            self._no_checkpoint(saving.now.step, error, final)
            return
        self._checkpointed, ended = saving.now.step, time.time()
        self.metrics.span("checkpoint", self._begun_s, ended, self._checkpointed)
        self.metrics.log(self._checkpointed, {"trainer/time/checkpoint_s": self._held_s + ended - began})
        oldest = checkpoint.prune(self.run_folder / "checkpoints", self.config.checkpoint.keep_last)
        for step in list_batches(self.run_folder):
            if step <= oldest:
                batch_path(self.run_folder, step).unlink()

    def _no_checkpoint(self, step: int, error: OSError, final: bool) -> None:
        """A full disk costs a checkpoint, not the run: training goes on with the previous one, unless nothing comes after."""
        if final or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise error
        self.metrics.event("checkpoint_failed", step=step, error=str(error))
        _warn(f"checkpoint of step {step} failed, training goes on with the previous one: {error}")

    def _resume(self) -> None:
        """From the newest checkpoint; batches after it that are on disk will be trained again, to the same weights."""
        found = checkpoint.newest(self.run_folder / "checkpoints")
        if found is not None:
            self.now = progress.load(self.team, found)
            self._checkpointed = self.step
            self.metrics.event("resumed", step=self.step)
        steps = list_batches(self.run_folder)
        first, self._trained_before = min(steps, default=self.step + 1), max(steps, default=0)
        if first > self.step + 1:
            start = f"the checkpoint of step {self.step}" if found else "nothing: it has no checkpoint"
            raise ModelError(
                f"{self.run_folder} cannot go on from {start}: the batches of the steps before {first} are gone. "
                f"Restore a checkpoint of step {first - 1} or later, or start afresh with --clean"
            )

    @contextmanager
    def _timed(self, name: str, step: int) -> Iterator[dict[str, float]]:
        """Measures its body, emits the span; 'seconds' is there afterwards."""
        timing, start = {}, time.time()
        yield timing
        end = time.time()
        timing["seconds"] = end - start
        self.metrics.span(name, start, end, step)


def keep_bad_batch(run_folder: Path, batch: Batch, outcome: StepOutcome) -> Path:
    """bad_batches/step_000012.batch and the reason beside it, for a re-run."""
    path = run_folder / "bad_batches" / batch_path(run_folder, batch.step).name
    path.parent.mkdir(exist_ok=True)
    write_durably(path, *encode_batch(batch))
    write_durably(path.with_suffix(".json"), json.dumps({"step": batch.step, "reason": outcome.problem}).encode())
    return path


def _warn(message: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the disk that is full
        print(f"trainer: WARNING: {message}", file=sys.stderr, flush=True)
