"""One of the trainer processes of `benchmarks.comm_bytes`: takes a step in every layout of its world, and counts what its collectives send.

python -m benchmarks._comm_worker FILE, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; the leading process writes FILE (JSON).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.config.train import TrainerConfig
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec
from slipstream.parallel.mesh import joined, spread
from slipstream.trainer.step import Learner
from slipstream.types import Batch, MicroBatch

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
ROW = 1024


def layouts(world: int) -> dict[str, dict[str, Any]]:
    """Keys of [trainer.parallel] and of [trainer] by name."""
    return {
        "FSDP": {},
        "FSDP, bf16": {"dtype": "bfloat16"},
        "EP": {"ep": world},
        "EP, bf16": {"ep": world, "dtype": "bfloat16"},
        "EP, recompute": {"ep": world, "recompute": "layer"},
        "CP all_gather": {"cp": world},
        "CP all_gather, recompute": {"cp": world, "recompute": "layer"},
        "CP ring": {"cp": world, "cp_method": "ring"},
        "CP ulysses": {"cp": world, "cp_method": "ulysses"},
    }


_KINDS = {
    "_allgather_base_": "weights",
    "_reduce_scatter_base_": "gradients",
    "alltoall_base_": "exchange",
    "allgather_": "gather",
    "reduce_scatter_": "scatter",
    "send": "ring",
    "recv_": "ring",
    "allreduce_": "sums",
    "broadcast_": "sums",
    "barrier": "sums",
}
"""What each collective is used for: the first two by FSDP; experts and Ulysses exchange; keys and values are gathered, their gradients
scattered, or both sent from process to process."""


class Counted(TorchDispatchMode):
    """Bytes that this process sends to others in the block, by collective: read from the arguments of every call, FSDP's own included."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self.sent[_KINDS[name]] += _bytes_sent(name, args)
        return func(*args, **(kwargs or {}))


def _bytes_sent(name: str, args: Any) -> int:
    """Over a network that every process hears once: a reduction is counted as its scatter, an all-reduce as scatter and gather."""
    if name in ("send", "recv_", "recv_any_source_"):
        return sum(x.nbytes for x in args[0]) if name == "send" else 0
    if name == "barrier":
        return 0
    group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
    size, rank = group.size(), group.rank()
    if name == "_allgather_base_":
        return args[1].nbytes * (size - 1)
    if name == "allgather_":
        return _total(args[1]) * (size - 1)
    if name == "_reduce_scatter_base_":
        return args[1].nbytes * (size - 1) // size
    if name == "reduce_scatter_":
        return _total(args[1][0]) * (size - 1) // size
    if name == "alltoall_base_":
        x, splits = args[1], list(args[4]) or [len(args[1]) // size] * size
        return (sum(splits) - splits[rank]) * (x.nbytes // max(1, len(x)))
    if name == "allreduce_":
        return 2 * _total(args[0]) * (size - 1) // size
    if name == "broadcast_":
        return _total(args[0]) if args[3] == rank else 0
    raise NotImplementedError(f"bytes of the collective {name}")


def _total(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def batch(world: int) -> Batch:
    """A full row a process, one document each, every expert chosen equally often: the formulas assume even routing."""
    rng, experts, top_k = np.random.default_rng(0), MODEL["num_experts"], MODEL["num_experts_per_tok"]
    rows = []
    for sample in range(world):
        start = np.arange(ROW) % experts
        ids_TK = (start[:, None] + np.arange(top_k) * (experts // top_k)) % experts
        rows.append(
            MicroBatch(
                tokens_T=rng.integers(0, MODEL["vocab_size"], ROW).astype(np.int32),
                positions_T=np.arange(ROW, dtype=np.int32),
                doc_starts_D=np.array([0, ROW], np.int32),
                loss_mask_T=np.arange(ROW) > 0,
                logprobs_T=np.full(ROW, -6.0, np.float32),
                versions_T=np.zeros(ROW, np.int32),
                advantages_T=np.ones(ROW, np.float32),
                temperature_T=np.ones(ROW, np.float32),
                sample_T=np.full(ROW, sample, np.int32),
                routing_TLK=np.repeat(ids_TK[:, None], MODEL["num_hidden_layers"], 1).astype(np.uint8),
                routing_valid_T=np.ones(ROW, bool),
            )
        )
    zeros = np.zeros(world, np.float32)
    return Batch(1, tuple(rows), world * (ROW - 1), tuple(f"r{i}" for i in range(world)), zeros, zeros)


def main(file: Path) -> None:
    torch.set_num_threads(1)
    world, found = int(os.environ["WORLD_SIZE"]), {}
    with joined(ParallelConfig(processes=world), timeout_s=120):
        for name, values in layouts(world).items():
            trainer = {key: values[key] for key in ("dtype", "recompute") if key in values}
            parallel = {"processes": world, **{key: value for key, value in values.items() if key not in trainer}}
            mesh = spread(validate(ParallelConfig, parallel))
            config = validate(TrainerConfig, {"row_tokens": ROW, **trainer})
            learner = Learner(build_model(ModelSpec.from_config(MODEL), seed=0), config, config.optim, 10, mesh)
            with Counted() as counted:
                learner.accumulate(batch(world))
            found[name] = dict(counted.sent)
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
