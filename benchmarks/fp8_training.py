"""What block-scaled FP8 costs in accuracy: the same small MoE trained in bfloat16 and in FP8, on the same batches.

The data are sequences of a random second-order Markov chain, so the loss has a floor that is far from 0 and differences are relative to
something. One process; the FP8 products are emulated, so times say nothing about FP8 hardware.

    loss_rel_diff      |loss in FP8 - loss in bfloat16| / loss in bfloat16, on held-out sequences after the last step; median of the seeds
    control_rel_diff   the same for float32 in place of FP8: how far rounding that nobody minds moves a run of this length
    grad_error         norm of (FP8 gradient - float32 gradient) / norm of the float32 gradient, on one batch with the same weights, the
                       same experts and the loss of training; at the start and at the end
    engine_kl          mean over sampled tokens of k3(p_trainer / p_engine): a bfloat16 engine that samples from the published weights
                       against the FP8 trainer and, for comparison, the bfloat16 trainer; experts replayed
    fp8_engine_kl      the same of an FP8 engine
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish, median
from benchmarks.replay_kl import compare
from slipstream.config import validate
from slipstream.config.serve import EngineConfig
from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.models.context import FullContext
from slipstream.models.fill import save_folder
from slipstream.models.hf import hf_tensors, write_tensors
from slipstream.models.load import build_model, load_model
from slipstream.models.spec import ModelSpec
from slipstream.trainer.sft import Demonstration, demonstration_batch
from slipstream.trainer.step import Learner
from slipstream.types import Batch, Completion, GenerateRequest, MicroBatch, Sampling

MODEL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 192,
    "intermediate_size": 192,
    "moe_intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""Dimensions above 128 that are not multiples of it: several blocks, and smaller ones at the edges."""
LENGTH = 64
DTYPES = ("bfloat16", "float8", "float32")
COLUMNS = (
    "seed",
    "dtype",
    "train_loss",
    "heldout_loss",
    "rel_diff",
    "grad_error_start",
    "grad_error_end",
    "engine_kl",
    "fp8_engine_kl",
    "fp8_input_error",
    "seconds",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16, help=f"sequences of {LENGTH} tokens a step")
    parser.add_argument("--quick", action="store_true", help="30 steps of 8 sequences, one seed: to see that it works")
    args = parser.parse_args()
    steps, seeds, samples = (30, 1, 8) if args.quick else (args.steps, args.seeds, args.samples)
    torch.set_num_threads(1)
    runs = [run for seed in range(seeds) for run in one_seed(seed, steps, samples)]
    fp8, control, base = (by_dtype(runs, dtype) for dtype in ("float8", "float32", "bfloat16"))
    headline = {
        "loss_rel_diff": median([run["rel_diff"] for run in fp8]),
        "loss_rel_diff_max": max(run["rel_diff"] for run in fp8),
        "loss_rel_diff_signed": statistics.mean(
            run["heldout_loss"] / other["heldout_loss"] - 1 for run, other in zip(fp8, base, strict=True)
        ),
        "control_rel_diff": median([run["rel_diff"] for run in control]),
        "grad_error": median([run["grad_error_end"] for run in fp8]),
        "grad_error_bfloat16": median([run["grad_error_end"] for run in base]),
        "engine_kl": median([run["engine_kl"] for run in fp8]),
        "engine_kl_bfloat16": median([run["engine_kl"] for run in base]),
        "fp8_engine_kl": median([run["fp8_engine_kl"] for run in fp8]),
        "fp8_engine_kl_bfloat16": median([run["fp8_engine_kl"] for run in base]),
        "steps": steps,
        "seeds": seeds,
    }
    notes = f"{steps} steps of {samples * LENGTH} tokens; floor of the loss (entropy of the chain) " + ", ".join(
        f"{run['floor']:.4f}" for run in base
    )
    finish("fp8_training", headline, runs, {"model": MODEL, "steps": steps, "seeds": seeds, "samples": samples}, COLUMNS, notes)


def by_dtype(runs: Sequence[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    return [run for run in runs if run["dtype"] == dtype]


def one_seed(seed: int, steps: int, samples: int) -> list[dict[str, Any]]:
    """The same weights and batches in every dtype."""
    chain = Chain(seed, MODEL["vocab_size"])
    batches = [demonstration_batch(step, chain.sequences(samples), samples * LENGTH) for step in range(1, steps + 1)]
    heldout = demonstration_batch(1, chain.sequences(256), 4096)
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "start"
        start.mkdir()
        (start / "config.json").write_text(json.dumps(MODEL))
        write_tensors(start, hf_tensors(build_model(ModelSpec.from_config(MODEL), seed=seed)))
        for dtype in DTYPES:
            learner, began = make_learner(start, dtype, steps), time.perf_counter()
            losses = [learner.step(batch).metrics for batch in batches]
            seconds = time.perf_counter() - began
            end = Path(scratch) / dtype
            save_folder(learner.weights.compute, end, like=start)
            run = {
                "seed": seed,
                "dtype": dtype,
                "train_loss": float(np.mean([m["trainer/loss/mean"] for m in losses[-steps // 10 :]])),
                "heldout_loss": loss(learner, heldout),
                "grad_error_start": gradient_error(start, dtype, batches[0], steps),
                "grad_error_end": gradient_error(end, dtype, batches[-1], steps),
                "engine_kl": engine_kl(end, learner, seed, "bfloat16"),
                "fp8_engine_kl": engine_kl(end, learner, seed, "float8"),
                "fp8_input_error": losses[-1].get("trainer/fp8/input_error"),
                "seconds": seconds,
                "floor": chain.entropy(),
            }
            run["rel_diff"] = abs(run["heldout_loss"] / (runs[0] if runs else run)["heldout_loss"] - 1)
            runs.append(run)
            print(f"seed {seed} {dtype}: held-out loss {run['heldout_loss']:.5f}, {seconds:.0f} s", flush=True)
    return runs


def make_learner(folder: Path, dtype: str, steps: int) -> Learner:
    """Demonstrations carry advantage 1, so the policy gradient is the gradient of the negative log-likelihood."""
    optim = validate(OptimConfig, {"lr": 2e-3, "warmup_steps": min(20, steps // 3), "schedule": "cosine", "final_fraction": 0.1})
    config = validate(TrainerConfig, {"dtype": dtype, "loss": {"type": "policy_gradient"}})
    return Learner(load_model(folder), config, optim, steps)


class Chain:
    """A random second-order Markov chain: the logits of the next token are those of the last one plus those of the one before."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._random = np.random.default_rng((seed, 1))
        logits_AAV = 1.5 * (self._random.standard_normal((vocab, 1, vocab)) + self._random.standard_normal((1, vocab, vocab)))
        odds_AAV = np.exp(logits_AAV)
        self.next_AAV = odds_AAV / odds_AAV.sum(-1, keepdims=True)
        self._tokens = 0
        self._surprise = 0.0

    def sequences(self, count: int) -> list[Demonstration]:
        """`count` sequences of LENGTH tokens; the first two are uniform and carry no loss."""
        tokens_ST = self._random.integers(0, len(self.next_AAV), (count, LENGTH))
        for t in range(2, LENGTH):
            odds_SV = self.next_AAV[tokens_ST[:, t - 2], tokens_ST[:, t - 1]]
            tokens_ST[:, t] = (odds_SV.cumsum(-1) > self._random.random((count, 1))).argmax(-1)
            self._surprise -= float(np.log(odds_SV[np.arange(count), tokens_ST[:, t]]).sum())
            self._tokens += count
        mask_T = np.arange(LENGTH) >= 2
        return [(tokens_T, mask_T) for tokens_T in tokens_ST]

    def entropy(self) -> float:
        """Nats a token over everything drawn: what the best model would lose."""
        return self._surprise / self._tokens


@torch.no_grad()
def loss(learner: Learner, batch: Batch) -> float:
    """Mean negative log-likelihood of the loss tokens, in the precision of training."""
    total, model = 0.0, learner.weights.compute
    for row in batch.micro_batches:
        hidden_TD = model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), FullContext(row.doc_starts_D))
        at_N = row.loss_mask_T.nonzero()[0]
        logprobs_NV = model.logits(hidden_TD[at_N - 1]).float().log_softmax(-1)
        total -= float(logprobs_NV.gather(1, torch.tensor(row.tokens_T[at_N]).long().unsqueeze(1)).sum(dtype=torch.float64))
    return total / batch.loss_tokens


def gradient_error(folder: Path, dtype: str, batch: Batch, steps: int) -> float:
    """See `grad_error` above: both take the experts that float32 chooses."""
    model, rows = load_model(folder), []
    for row in batch.micro_batches:
        context = FullContext(row.doc_starts_D, record=True)
        with torch.no_grad():
            model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), context)
        ids_TLK = context.native_ids_TLK.numpy().astype(np.uint8)
        rows.append(replace(row, routing_TLK=ids_TLK, routing_valid_T=np.ones(row.num_tokens, dtype=bool)))
    forced = replace(batch, micro_batches=tuple(rows))
    exact, other = (make_learner(folder, kind, steps) for kind in ("float32", dtype))
    exact.accumulate(forced)
    other.accumulate(forced)
    pairs = [(a.grad, b.grad) for a, b in zip(exact.weights.parameters, other.weights.parameters, strict=True)]
    difference = sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in pairs if a is not None and b is not None)
    return (difference / sum(float(a.square().sum(dtype=torch.float64)) for a, _ in pairs if a is not None)) ** 0.5


def engine_kl(folder: Path, learner: Learner, seed: int, dtype: str) -> float:
    """256 continuations of 32 tokens by an engine in `dtype`, scored by the trainer's compute copy."""
    config = validate(EngineConfig, {"dtype": dtype, "kv_memory_mib": 64, "max_running": 64})
    engine, random = EmbeddedEngine(folder, config, LENGTH, seed=seed), np.random.default_rng((seed, 2))
    prompts = {f"r{i}": random.integers(0, MODEL["vocab_size"], 8).astype(np.int32) for i in range(256)}
    for name, prompt_T in prompts.items():
        engine.add(GenerateRequest(name, prompt_T, Sampling(max_tokens=32)))
    done: list[Completion] = []
    while engine.has_work:
        done += engine.step().finished
    rows = [_scored_row(prompts[completion.id], completion) for completion in done]
    return compare(learner.weights.compute, rows, replay=True)["kl"]


def _scored_row(prompt_T: np.ndarray, completion: Completion) -> MicroBatch:
    tokens_T = np.concatenate([prompt_T, completion.tokens_N]).astype(np.int32)
    count, routing = len(tokens_T), completion.routing
    assert routing is not None and routing.start == 0
    ids_TLK = np.zeros((count, *routing.ids_TLK.shape[1:]), routing.ids_TLK.dtype)
    valid_T = np.zeros(count, dtype=bool)
    ids_TLK[: len(routing.ids_TLK)], valid_T[: len(routing.valid_T)] = routing.ids_TLK, routing.valid_T
    return MicroBatch(
        tokens_T=tokens_T,
        positions_T=np.arange(count, dtype=np.int32),
        doc_starts_D=np.array([0, count], dtype=np.int32),
        loss_mask_T=np.arange(count) >= len(prompt_T),
        logprobs_T=np.concatenate([np.zeros(len(prompt_T)), completion.logprobs_N]).astype(np.float32),
        versions_T=np.zeros(count, dtype=np.int32),
        advantages_T=np.ones(count, dtype=np.float32),
        temperature_T=np.ones(count, dtype=np.float32),
        sample_T=np.zeros(count, dtype=np.int32),
        routing_TLK=ids_TLK,
        routing_valid_T=valid_T,
    )


if __name__ == "__main__":
    main()
