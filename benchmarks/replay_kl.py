"""How far engine and trainer disagree about the policy, with router replay and without, on the same weights.

An engine in bfloat16 samples rollouts at temperature 1 and records which experts each token used; the trainer's model in float32 scores
the same tokens, once with those experts forced and once with its own choice. The control does the same with an engine in float32: what
is left there is arithmetic alone. One process, no servers.

    kl            mean over sampled tokens of k3(ratio) = ratio - 1 - log ratio, ratio = p_trainer / p_engine
    kl_error      its standard error: rare tokens with a large gap make most of the mean
    extreme       share of sampled tokens with a ratio outside [0.5, 2]
    flip_frac     share of (token, MoE layer) pairs whose experts, as a set, differ between the engine and the trainer's own choice
    coverage      share of tokens whose experts are known (all but the last of each rollout, which predicts nothing)
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._runs import run_config, warm_model
from benchmarks.harness import finish
from slipstream.algorithms.losses import k3
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.local import local_engine
from slipstream.envs.base import load_env
from slipstream.envs.play import EnvPlayer
from slipstream.models.decoder import Decoder
from slipstream.models.load import load_model
from slipstream.ops import token_logprobs
from slipstream.orchestrator.pack import pack
from slipstream.orchestrator.samples import rollout_samples
from slipstream.trainer.routing import RoutingStats, row_context
from slipstream.types import MicroBatch, Rollout

COLUMNS = (
    "engine",
    "replay",
    "tokens",
    "kl",
    "kl_error",
    "extreme",
    "max_abs",
    "mean_abs",
    "flip_frac",
    "coverage",
    "sampling_s",
    "scoring_s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens, at least, for each engine precision")
    parser.add_argument(
        "--model", type=Path, help="an HF folder of a mixture of experts; default: the quickstart's model after its warm-up"
    )
    parser.add_argument("--quick", action="store_true", help="2,000 tokens: to see that it works")
    args = parser.parse_args()
    tokens = 2_000 if args.quick else args.tokens
    config = run_config("bench-replay", args.model or warm_model(), {})
    torch.set_num_threads(1)
    model = load_model(config.model.path)

    runs = []
    for dtype in ("float32", "bfloat16"):
        started = time.perf_counter()
        rows = asyncio.run(sample_rows(config, {"dtype": dtype}, tokens))
        sampled_s = time.perf_counter() - started
        for replay in (True, False):
            started = time.perf_counter()
            measured = compare(model, rows, replay)
            runs.append(
                {"engine": dtype, "replay": replay, **measured, "sampling_s": sampled_s, "scoring_s": time.perf_counter() - started}
            )
    control, _, with_replay, without = runs
    headline = {
        "kl_without": without["kl"],
        "kl_with": with_replay["kl"],
        "extreme_without": without["extreme"],
        "extreme_with": with_replay["extreme"],
        "flip_frac": with_replay["flip_frac"],
        "coverage": with_replay["coverage"],
        "control_max_abs": control["max_abs"],
    }
    top1, balance = router_shape(model, rows[0])
    notes = (
        f"{config.model.path.name}: the router's first choice has probability {top1:.3f} on average "
        f"(uniform: {1 / model.spec.num_experts:.3f}), its busiest expert {balance:.2f} times the mean load"
    )
    setting = {**config.model_dump(mode="json"), "tokens": tokens}
    finish("replay_kl", headline, runs, setting, COLUMNS, notes)


async def sample_rows(config: RunConfig, settings: Mapping[str, Any], min_tokens: int) -> tuple[MicroBatch, ...]:
    """Rollouts of the run's first environment with at least `min_tokens` sampled tokens, as the trainer's packed rows. `settings`: of the
    engine, in place of the run's."""
    env_config = config.envs[0]
    env = load_env(env_config, config.seed)
    engine_config = config.engine.replace(**settings)
    engine = EmbeddedEngine(config.model.path, engine_config, config.model.seq_len, seed=config.seed, version=0)
    rollouts: list[Rollout] = []
    async with local_engine(engine) as port:
        player = EnvPlayer(env, port, ChatTokenizer.load(config.model.path), env_config, config.model.seq_len)
        while sum(rollout.num_sampled for rollout in rollouts) < min_tokens:
            first = len(rollouts)
            tasks = [env.task("train", first + i) for i in range(engine_config.max_running)]
            rollouts += await asyncio.gather(*(player(task, f"r{first + i}", task.id, 0) for i, task in enumerate(tasks)))
    samples = [sample for rollout in rollouts if rollout.outcome.gradable for sample in rollout_samples(rollout, 1.0)]
    return pack(samples, config.trainer.row_tokens)


@torch.no_grad()
def compare(model: Decoder, rows: Sequence[MicroBatch], replay: bool) -> dict[str, Any]:
    """The trainer's logprobs of `rows` against the engine's."""
    routing, trainer, engine = RoutingStats(model.spec), [], []
    for row in rows:
        context = row_context(row, model.spec, replay)
        hidden_TD = model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), context)
        at_N = row.loss_mask_T.nonzero()[0]
        targets_N, temperature_N = torch.tensor(row.tokens_T[at_N]), torch.tensor(row.temperature_T[at_N])
        trainer.append(token_logprobs(hidden_TD[at_N - 1], model.head_weight, targets_N, temperature_N, 1024)[0])
        engine.append(torch.tensor(row.logprobs_T[at_N]))
        routing.add(row, context, replay)
    trainer_N, engine_N = torch.cat(trainer), torch.cat(engine)
    gap_N, kl_N = (trainer_N - engine_N).abs().double(), k3(trainer_N.double(), engine_N.double())
    stats = routing.metrics()
    return {
        "tokens": len(gap_N),
        "kl": float(kl_N.mean()),
        "kl_error": float(kl_N.std() / len(kl_N) ** 0.5),
        "extreme": float((gap_N > np.log(2.0)).double().mean()),
        "max_abs": float(gap_N.max()),
        "mean_abs": float(gap_N.mean()),
        "flip_frac": stats["trainer/replay/flip_frac"] if replay else None,
        "coverage": stats["trainer/replay/coverage_frac"] if replay else None,
    }


class Watch:
    """A training context that looks at the router's scores on their way."""

    def __init__(self, row: MicroBatch, model: Decoder) -> None:
        self.inner = row_context(row, model.spec, replay=False)
        self.attend, self.weigh = self.inner.attend, self.inner.weigh
        self.top1: list[float] = []
        """Mean probability of the first choice, by MoE layer."""

    def route(self, moe_layer: int, scores_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        self.top1.append(float(scores_TE.softmax(-1).amax(-1).mean()))
        return self.inner.route(moe_layer, scores_TE, top_k)


@torch.no_grad()
def router_shape(model: Decoder, row: MicroBatch) -> tuple[float, float]:
    """(mean probability of the router's first choice, load of the busiest expert over the mean load), mean over MoE layers."""
    watch, stats = Watch(row, model), RoutingStats(model.spec)
    model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), watch)
    stats.add(row, watch.inner, replay=False)
    return float(np.mean(watch.top1)), stats.metrics()["trainer/balance/imbalance"]


if __name__ == "__main__":
    main()
