"""One of several processes that meet: python -m tests.dist.meet_worker KIND FOLDER, with the variables that torchrun sets.

Writes FOLDER/rank<n>.json: every (address, port) at which this process listens while it is part of a group with all its subgroups.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from slipstream.config.parallel import ParallelConfig
from slipstream.config.wide import WideConfig
from slipstream.parallel import mesh, wide


def main(kind: str, folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if kind == "trainer":
        joined = mesh.joined(ParallelConfig(processes=world, ep=world), 60)
    else:
        joined = wide.joined(WideConfig(ranks=world))
    with joined as group:
        if isinstance(group, wide.WideGroup):
            group.largest([1])
        total = torch.ones(1)
        dist.all_reduce(total)
        here = [c.laddr for c in psutil.Process().net_connections("all") if c.status == psutil.CONN_LISTEN]
        found = {"total": float(total), "listening": [[address.ip, address.port] for address in here]}
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
