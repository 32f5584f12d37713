"""The main job from nothing: make a tiny MoE, warm it up on demonstrations, train it by asynchronous RL, show the result.

Runs the same commands that you would type, prints each, and measures wall time and resident memory over all of its processes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

CONFIG = "configs/quickstart.toml"


class MemoryWatch(threading.Thread):
    """Peak of the memory of all child processes together, sampled every two seconds (reading it costs milliseconds a gigabyte).

    Proportional set size: pages that several processes share (the libraries) are counted once.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(2.0):
            self.peak_bytes = max(self.peak_bytes, sum(map(_memory, psutil.Process().children(recursive=True))))

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak_bytes


def _memory(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except psutil.Error:
        return 0
    return getattr(full, "pss", full.rss)


def slipstream(*args: str) -> None:
    print(f"\n$ slipstream {' '.join(args)}", flush=True)
    result = subprocess.run([sys.executable, "-m", "slipstream.cli", *args], check=False)
    if result.returncode:
        sys.exit(result.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="quickstart-0", help="name of the run; the run folder is runs/NAME")
    args = parser.parse_args()
    raw, warm, run = f"models/tiny-moe-{args.seed}", f"models/tiny-moe-{args.seed}-warm", Path("runs") / args.name
    for folder in (raw, warm):
        shutil.rmtree(folder, ignore_errors=True)
    seed = f"seed={args.seed}"

    start, watch = time.monotonic(), MemoryWatch()
    watch.start()
    slipstream("make-model", raw, "--preset", "tiny-moe", "--env", "calculator", "--seed", str(args.seed))
    slipstream("sft", CONFIG, "--model", raw, "--out", warm, "--set", seed)
    warm_s = time.monotonic() - start
    slipstream("rl", CONFIG, "--clean", "--set", seed, "--set", f"name={args.name}", "--set", f"model.path={warm}")
    wall_s, peak = time.monotonic() - start, watch.stop()

    result = {"seed": args.seed, "wall_s": round(wall_s, 1), "warm_up_s": round(warm_s, 1), "peak_memory_gib": round(peak / 2**30, 2)}
    (run / "quickstart.json").write_text(json.dumps(result))
    print(f"\nwhole job:    {wall_s:.0f} s ({warm_s:.0f} s to make and warm up the model), peak memory {peak / 2**30:.2f} GiB")
    print(f'try it:       .venv/bin/slipstream generate {run / "final"} "12+30-7" --env calculator')


if __name__ == "__main__":
    main()
