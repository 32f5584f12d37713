"""One trainer process of `benchmarks.trainer_memory`: load and step, and say how much memory that took.

python -m benchmarks._memory_worker MODEL LAYOUT OUT TOKENS, LAYOUT as JSON; with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.config.train import TrainerConfig
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec
from slipstream.parallel.mesh import joined
from slipstream.trainer.sft import demonstration_batch
from slipstream.trainer.step import Learner, learner_of
from slipstream.types import Batch

SAMPLE_S = 0.0005
_Result = TypeVar("_Result")


def main(model: Path, layout: str, out: Path, tokens: int) -> None:
    torch.set_num_threads(1)
    values = {"row_tokens": tokens, "router_replay": False, "loss": {"type": "policy_gradient"}}
    config = validate(TrainerConfig, values)
    parallel = validate(ParallelConfig, {"processes": int(os.environ["WORLD_SIZE"]), **json.loads(layout)})
    with joined(parallel, timeout_s=300) as mesh:
        spec = ModelSpec.from_folder(model)
        tiny = build_model(ModelSpec.from_config(json.loads((model / "tiny.json").read_text())))
        warm = Learner(tiny, config, config.optim, 10, mesh)  # libraries, thread pools, connections: there whatever the size of the model
        for step in (1, 2):
            warm.step(batch(step, 32, tokens, parallel.data))
        del tiny, warm
        before = settled()
        mesh.exchange(0)
        learner, load = peak(lambda: learner_of(model, config, config.optim, 10, mesh))
        own = sum(piece.local.nbytes for piece in learner.state().values())
        learner.step(batch(1, spec.vocab_size, tokens, parallel.data))  # the moments come with the first step
        settled()
        _, step = peak(lambda: learner.step(batch(2, spec.vocab_size, tokens, parallel.data)))
        result = {"own": own, "load": load - before, "step": step - before}
        (out / f"{mesh.rank}.json").write_text(json.dumps(result))


def batch(step: int, vocab: int, tokens: int, rows: int) -> Batch:
    """A row of one sample for each process that has rows of its own."""
    rng = np.random.default_rng(step)
    samples = [(rng.integers(0, vocab, tokens), np.arange(tokens) > 0) for _ in range(rows)]
    return demonstration_batch(step, samples, tokens)


def anonymous() -> int:
    """Resident private memory in bytes that no file backs (RssAnon): mapped model files and libraries are not in it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def settled() -> int:
    """`anonymous`, after everything that can be has been given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous()


def peak(work: Callable[[], _Result]) -> tuple[_Result, int]:
    """What `work` returns, and the most `anonymous` while it ran, sampled every half millisecond."""
    done, seen = threading.Event(), [anonymous()]

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            seen[0] = max(seen[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()
    return result, max(seen[0], anonymous())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
