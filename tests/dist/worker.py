"""One of several trainer processes of a test: runs every case, one after the other, since starting takes longer than any of them.

python -m tests.dist.worker FOLDER, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Writes FOLDER/<number of the case>.pt, and
FOLDER/<case>/ with a checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.parallel.mesh import Mesh, joined, spread
from slipstream.trainer import progress
from slipstream.trainer.team import Team, follow
from tests.dist.cases import LAYOUTS, Case, batch, cases, learner, outcome, resumed


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(1100, exit=True)  # where a worker hangs is what one wants to know
    world = int(os.environ["WORLD_SIZE"])
    layouts = {name: validate(ParallelConfig, {"processes": world, **values}) for name, values in LAYOUTS[world].items()}
    with joined(next(iter(layouts.values())), timeout_s=600):
        for layout, config in layouts.items():
            mesh = spread(config)
            for number, case in enumerate(cases(world)):
                if case.layout == layout:
                    result = outcome(case, mesh)
                    if mesh.leads:
                        torch.save(result, folder / f"{number}.pt")
            for case in resumed(world):
                if case.layout == layout:
                    team(case, mesh, folder / str(case))


def team(case: Case, mesh: Mesh, folder: Path) -> None:
    """Step, checkpoint, step; then go back to the checkpoint and step again."""
    subject = learner(case, mesh)
    if not mesh.leads:
        return follow(subject)
    with Team(subject) as leader:
        leader.step(batch(case, 1))
        saved = progress.save(folder, leader, progress.Progress(1), "")
        outcomes = {}
        for name in ("straight", "resumed"):
            leader.step(batch(case, 2))
            outcomes |= {f"{name}/{key}": tensor.clone() for key, tensor in leader.published().items()}
            progress.load(leader, saved)
        torch.save(outcomes, folder / "outcomes.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
