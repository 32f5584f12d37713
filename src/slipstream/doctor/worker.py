"""One process of a world: computes every case of that world, one after the other, since starting takes longer than any of them.

python -m slipstream.doctor.worker FOLDER, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where there are several. Reads what
`checks` has put into FOLDER; writes FOLDER/case-<number>.pt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import load, validate
from slipstream.config.base import merge
from slipstream.config.parallel import ParallelConfig
from slipstream.config.train import TrainerConfig
from slipstream.errors import ConfigError
from slipstream.models.load import load_model
from slipstream.parallel.mesh import ALONE, Mesh, joined, spread
from slipstream.parallel.pieces import gather
from slipstream.trainer import progress
from slipstream.trainer.step import Learner
from slipstream.trainer.team import Team, follow
from slipstream.transport.codec import decode_batch
from slipstream.types import Batch

COLLECTIVE_S = 300.0
TRAINER_FILE = "trainer.toml"
OTHER_EXPERTS, REPLAY_OFF = "other experts", "replay off"


@dataclass(frozen=True)
class Case:
    """One way to compute what must come out the same."""

    name: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [trainer.parallel]; without any: one process."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [trainer] that differ from the user's."""
    batch: str = "packed"
    resume: bool = False
    """Whether to go back to a checkpoint and step again."""

    @property
    def world(self) -> int:
        return int(self.parallel.get("processes", 1))


def cases(trainer: TrainerConfig) -> list[Case]:
    """All of them; the first one is what the others are compared with."""
    again = "none" if trainer.recompute == "layer" else "layer"
    two, four = {"processes": 2}, {"processes": 4}
    return [
        Case("one process"),
        Case("a row a sample", batch="alone"),
        Case("one row", batch="together"),
        Case("other order", batch="reversed"),
        Case("recompute", trainer={"recompute": again}),
        Case(REPLAY_OFF, trainer={"router_replay": False}),
        Case(OTHER_EXPERTS, batch="forced"),
        Case("resume", resume=True),
        Case("FSDP 2", two),
        Case("HSDP 2", {**two, "dp_replicate": 2}),
        Case("EP 2", {**two, "ep": 2}),
        Case("EP 2, recompute", {**two, "ep": 2}, {"recompute": again}),
        *(Case(f"CP 2, {method}", {**two, "cp": 2, "cp_method": method}) for method in ("all_gather", "ring", "ulysses")),
        Case("PP 2", {**two, "pp": 2}),
        Case("FSDP 2, resume", two, resume=True),
        Case("EP 2 x FSDP 2", {**four, "ep": 2}),
        Case("EP 4 x CP 2", {**four, "ep": 4, "cp": 2, "cp_method": trainer.parallel.cp_method}),
    ]


def case_file(folder: Path, number: int) -> Path:
    return folder / f"case-{number:02d}.pt"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    trainer, world = load(TrainerConfig, [folder / TRAINER_FILE]), int(os.environ.get("WORLD_SIZE", "1"))
    with joined(ParallelConfig(processes=world), COLLECTIVE_S) as everyone:
        for number, case in enumerate(cases(trainer)):
            if case.world != world:
                continue
            try:
                layout = validate(ParallelConfig, case.parallel)
                learner = _learner(folder / "model", trainer, case, ALONE if world == 1 else spread(layout))
            except ConfigError as error:  # the same in all processes, before they talk
                outcome: dict[str, Any] = {"refused": str(error)}
            else:
                batch = decode_batch((folder / f"{case.batch}.batch").read_bytes())
                outcome = _resumed(learner, batch, folder / f"checkpoint-{number}") if case.resume else _outcome(learner, batch)
            if everyone.leads:
                torch.save(outcome, case_file(folder, number))


def _learner(model: Path, users: TrainerConfig, case: Case, mesh: Mesh) -> Learner:
    """The user's trainer in float32, so that what differs is a fault and not rounding.

    AdamW divides by the root of its second moment: a gradient that is rounding noise would become a whole step, so `eps` is well above it.
    """
    optim = {"lr": 1e-3, "eps": 1e-6, "clip_norm": 0.5, "warmup_steps": 0, "schedule": "constant", "moments": "float32"}
    values = merge(users.model_dump(), {"dtype": "float32", "logprob_chunk_tokens": 16, "optim": optim, **case.trainer})
    values["parallel"] = case.parallel
    if users.lora is not None:
        values["lora"]["path"] = None  # it fits the user's model only
    trainer = validate(TrainerConfig, values)
    return Learner(load_model(model), trainer, trainer.optim, 10, mesh)


def _outcome(learner: Learner, batch: Batch) -> dict[str, Any]:
    """Loss and gradients of the batch, what the router did, and the weights after two steps; only the leading process has tensors."""
    sums, routing = learner.accumulate(batch)
    grads = gather({name: p.grad for name, p in learner.weights.trained.items() if p.grad is not None}, learner.mesh)
    gradients = {name: tensor.clone() for name, tensor in grads.items()}
    metrics = routing.metrics()
    for _ in range(2):
        learner.step(batch)
    return {
        "loss": sums.loss,
        "gradients": gradients,
        "load": torch.from_numpy(routing.load_LE.copy()),
        "kl": sums.metrics().get("trainer/mismatch_kl/fresh", float("nan")),
        "flips": metrics.get("trainer/replay/flip_frac", 0.0),
        "coverage": metrics.get("trainer/replay/coverage_frac", 0.0),
        "weights": {name: tensor.clone() for name, tensor in learner.masters().items()},
    }


def _resumed(learner: Learner, batch: Batch, folder: Path) -> dict[str, Any]:
    """Whether a step after a checkpoint gives the same bits when it is gone back to."""
    if not learner.mesh.leads:
        follow(learner)
        return {}
    with Team(learner) as team:
        team.step(batch)
        saved = progress.save(folder, team, progress.Progress(1), "")
        ends: list[dict[str, Tensor]] = []
        for _ in range(2):
            team.step(batch)
            ends.append({name: tensor.clone() for name, tensor in team.published().items()})
            progress.load(team, saved)
    straight, resumed = ends
    return {"differ": sorted(name for name in straight if not torch.equal(straight[name], resumed[name]))}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
