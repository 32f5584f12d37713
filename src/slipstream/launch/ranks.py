"""Run one command as several processes that belong together: for `slipstream sft` and `slipstream engine`, which no supervisor watches."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from slipstream.launch.local import free_port, how_ended
from slipstream.launch.topology import ranks

POLL_S = 0.1
GRACE_S = 10.0
"""Time for the other processes to say why they end, after one has failed."""


def needed(size: int) -> bool:
    """Whether `size` processes have to be started: not for one, nor within one of them."""
    return size > 1 and "WORLD_SIZE" not in os.environ


def run(size: int, what: str = "trainer process") -> int:
    """This command line again, as `size` processes. Returns the exit code: that of the first one that failed, which ends the others."""
    port = free_port()
    command = (sys.executable, "-m", "slipstream.cli", *sys.argv[1:])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "SLIPSTREAM_PARENT": str(os.getpid())}
    started = [subprocess.Popen(command, env={**environment, **ranks(rank, size, port)}) for rank in range(size)]
    try:
        while all(process.poll() in (None, 0) for process in started) and any(process.poll() is None for process in started):
            time.sleep(POLL_S)
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for rank, process in enumerate(started):
            if (process.poll() or 0) < 0:
                print(f"error: {what} {rank} {how_ended(process.returncode)}", file=sys.stderr)
        return next((code if code > 0 else 1 for process in started if (code := process.poll())), 0)
    finally:
        for process in started:
            process.kill()
            process.wait()
