"""One of several trainer processes of a test: loads a model folder or a checkpoint that another number of processes wrote, and writes what it holds.

python -m tests.dist.resharding FOLDER, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. FOLDER/jobs.json lists, for each job, the layout, the
checkpoint to begin with ("": none), the folder for what comes out, and the rank whose disk is full at the first checkpoint (-1: none).
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.config.train import TrainerConfig
from slipstream.errors import ModelError
from slipstream.parallel.mesh import ALONE, Mesh, joined, spread
from slipstream.parallel.pieces import gather
from slipstream.trainer import checkpoint, progress, shards
from slipstream.trainer.optim import optimizer_tensors
from slipstream.trainer.publish import publish
from slipstream.trainer.step import Learner, learner_of
from slipstream.trainer.team import Team, follow
from slipstream.types import Batch
from tests.dist.cases import ROW_TOKENS, Case, batch

DTYPE = "bfloat16"
"""Published weights are rounded, masters are not: what is mixed up shows."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(300, exit=True)
    world, jobs = int(os.environ["WORLD_SIZE"]), json.loads((folder / "jobs.json").read_text())
    with joined(validate(ParallelConfig, {"processes": world}), timeout_s=120):
        for job in jobs:
            mesh = spread(validate(ParallelConfig, {"processes": world, **job["layout"]}))
            if job["full"] == mesh.rank:
                full_disk_once()
            problem = run(Path(job["model"]), job["start"], Path(job["out"]), mesh)
            if problem:
                (Path(job["out"]) / f"problem{mesh.rank}").write_text(problem)


def run(model: Path, start: str, out: Path, mesh: Mesh = ALONE) -> str:
    """Load, write what is there, step, publish, write a checkpoint. Returns the ModelError that ended it, if one did."""
    out.mkdir(parents=True, exist_ok=True)
    config = validate(TrainerConfig, {"row_tokens": ROW_TOKENS, "dtype": DTYPE, "optim": {"lr": 1e-3, "eps": 1e-6}})
    try:
        subject = learner_of(model, config, config.optim, max_steps=10, mesh=mesh)
        if start:
            found = checkpoint.read(Path(start))
            subject.restore(found.tensors())
    except ModelError as error:
        return str(error)
    loaded = whole(subject)
    if mesh.leads:
        torch.save(loaded, out / "loaded.pt")
        with Team(subject) as leader:
            publish(out / "weights", 0, leader.published(), None)
            with closing(leader.published().items()) as items:
                next(items)  # who stops early does not leave the others sending
            leader.step(rows(1))
            saving = progress.begin(out / "checkpoints", leader, progress.Progress(1))
            leader.step(rows(2))  # what is being written must not change with it
            try:
                progress.finish(saving, leader, "")
            except OSError as error:
                left = sorted(path.name for path in (out / "checkpoints").iterdir())
                (out / "failed.json").write_text(json.dumps([error.errno, error.filename, left]))
                progress.save(out / "checkpoints", leader, progress.Progress(2), "")
            publish(out / "weights", 2, leader.published(), 1)
    else:
        follow(subject)
    return ""


def full_disk_once() -> None:
    """The next shard of this process does not fit."""
    write = shards.write_shard

    def full(path: Path, staged: shards.Staged) -> dict[str, Any]:
        shards.write_shard = write
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    shards.write_shard = full


def rows(step: int) -> Batch:
    return batch(Case(""), step)


def whole(subject: Learner) -> dict[str, torch.Tensor]:
    """Masters and moments."""
    state = dict(subject.weights.master.named_parameters()) | optimizer_tensors(subject.optimizer, subject.names)
    return {name: tensor.clone() for name, tensor in gather(state, subject.mesh).items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
