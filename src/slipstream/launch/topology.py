"""Which processes a run consists of: a pure function from a run folder and its configuration to a list.

Knows nothing of how they are started: `local` forks them on this machine, other launchers render the same list elsewhere.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config import RunConfig
from slipstream.envs.frozen import dump_file


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One role process."""

    name: str
    """'engine-0', 'trainer', 'trainer-1', 'orchestrator': also the name of its log file."""
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    restart: bool = False
    """True for roles without state that a crash could lose: the supervisor starts them again."""
    group: str = ""
    """Processes of one group meet (RANK, WORLD_SIZE, a port of the supervisor's choice) and cannot do without each other: when one ends,
    all are started again. '': alone."""
    frozen: Path | None = None
    """Grows when the process ended because an environment had frozen it: then too the supervisor starts it again."""


def processes(config: RunConfig, run_folder: Path, port: int = 0) -> list[ProcessSpec]:
    """Every role process of a run, in the order in which to start them. `port`: where several trainer processes meet."""
    slipstream = (sys.executable, "-m", "slipstream.cli")
    folder, wide = str(run_folder), config.engine.ranks
    engines = [
        ProcessSpec(
            f"engine-{replica}",
            (*slipstream, "engine", "--run", folder, "--replica", str(replica)),
            _threads(config.engine.threads) | ranks(replica % wide, wide, 0),
            restart=True,
            group=f"engines-{replica // wide}" if wide > 1 else "",
        )
        for replica in range(0 if config.router.urls else config.engine.replicas)  # those of router.urls run already
    ]
    threads, size = _threads(config.trainer.threads), config.trainer.parallel.processes
    trainers = [
        ProcessSpec(f"trainer-{rank}" if rank else "trainer", (*slipstream, "trainer", folder), threads | ranks(rank, size, port))
        for rank in range(size)
    ]
    orchestrator = ProcessSpec("orchestrator", (*slipstream, "orchestrator", folder), _threads(1), frozen=dump_file(run_folder))
    return [*trainers, *engines, orchestrator]


def ranks(rank: int, size: int, port: int) -> dict[str, str]:
    """How processes of one group find each other: the variables that torchrun sets. None for one process."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if size > 1 else {}


def _threads(count: int) -> dict[str, str]:
    """OpenMP threads spin at barriers: two of them on two busy cores stall small matmuls, so each role gets its own number."""
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}
