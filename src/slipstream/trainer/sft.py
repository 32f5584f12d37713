"""Supervised fine-tuning on given tokens: the RL step with the loss -1 · log p on every token of the loss mask.

Knows nothing of environments or text: demonstrations come in as token arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from slipstream.algorithms.packing import assign
from slipstream.config import RunConfig, validate
from slipstream.config.train import PolicyGradientLoss, SftConfig
from slipstream.errors import ConfigError, TrainerError
from slipstream.models.fill import save_weights
from slipstream.models.impl import read_spec
from slipstream.models.peft import write_adapter
from slipstream.parallel.mesh import ALONE, Mesh
from slipstream.trainer.step import Learner, StepOutcome, learner_of
from slipstream.trainer.team import Team, follow
from slipstream.types import Batch, BoolArray, IntArray, MicroBatch

Demonstration = tuple[IntArray, BoolArray]
"""(tokens_T, loss_mask_T); the mask is False at position 0."""


def train(
    model_folder: Path,
    samples: Sequence[Demonstration],
    config: RunConfig,
    out_folder: Path,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    mesh: Mesh = ALONE,
) -> dict[str, float]:
    """Train for `config.sft.steps` steps and write `out_folder` as an HF folder. Returns the metrics of the last step.

    With [trainer.lora] that is the merged model, and the adapter is in `adapter_folder` beside it.

    Metrics: loss (nats a token), grad_norm, lr, tokens (of the step), tokens_per_s.
    In the leading process of the trainer; the others run `assist`.
    Raises ConfigError: no [sft] table, no samples, or one longer than a row; TrainerError: too many non-finite steps in a row.
    """
    sft = config.sft
    if sft is None:
        raise ConfigError("sft: the run file has no [sft] table; add one (an empty table takes every default)")
    if not samples:
        raise ConfigError("sft: there are no demonstrations to train on; raise sft.num_demonstrations")
    chosen, bad_steps, metrics = draws(len(samples), sft.samples_per_step, config.seed), 0, {}
    with Team(_learner(model_folder, config, sft, mesh)) as team:
        for step in range(1, sft.steps + 1):
            began = time.perf_counter()
            outcome = team.step(demonstration_batch(step, [samples[i] for i in next(chosen)], config.trainer.row_tokens))
            bad_steps = bad_steps + 1 if outcome.problem else 0
            if bad_steps >= config.trainer.max_bad_steps:
                raise TrainerError(f"sft: {bad_steps} steps in a row were skipped, the last because {outcome.problem}; lower sft.optim.lr")
            metrics = _metrics(outcome, time.perf_counter() - began)
            if on_step is not None:
                on_step(step, metrics)
        save_weights(team.published(), read_spec(model_folder, config.model.impl), out_folder, like=model_folder)
        if team.adapters is not None:
            write_adapter(adapter_folder(out_folder), team.adapters, model_folder)
    return metrics


def adapter_folder(out_folder: Path) -> Path:
    """OUT-adapter. Not within OUT: transformers adds an adapter that it finds in a model folder, and it would count twice."""
    return out_folder.with_name(f"{out_folder.name}-adapter")


def assist(model_folder: Path, config: RunConfig, mesh: Mesh) -> None:
    """What the other processes of the trainer run while the leading one runs `train`."""
    assert config.sft is not None
    follow(_learner(model_folder, config, config.sft, mesh))


def _learner(model_folder: Path, config: RunConfig, sft: SftConfig, mesh: Mesh) -> Learner:
    trainer = config.trainer.replace(loss=validate(PolicyGradientLoss, {}))
    return learner_of(model_folder, trainer, sft.optim, sft.steps, mesh, impl=config.model.impl)


def draws(num_samples: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of sample indices for ever: every sample once per epoch, each epoch in another seeded order."""
    epoch, queue = 0, []
    while True:
        while len(queue) < size:
            queue += np.random.default_rng((seed, epoch)).permutation(num_samples).tolist()
            epoch += 1
        yield queue[:size]
        queue = queue[size:]


def demonstration_batch(step: int, samples: Sequence[Demonstration], row_tokens: int) -> Batch:
    """Demonstrations packed into rows, as a batch in which every loss token has advantage 1."""
    rows = tuple(_row(samples, index_S) for index_S in assign([len(tokens) for tokens, _ in samples], row_tokens))
    loss_tokens = sum(int(row.loss_mask_T.sum()) for row in rows)
    ones_S = np.ones(len(samples), dtype=np.float32)
    return Batch(step, rows, loss_tokens, tuple(f"demonstration/{i}" for i in range(len(samples))), ones_S, ones_S)


def _row(samples: Sequence[Demonstration], index_S: np.ndarray) -> MicroBatch:
    tokens = [samples[i][0] for i in index_S]
    lengths = np.array([len(t) for t in tokens])
    starts_D = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    total = int(starts_D[-1])
    return MicroBatch(
        tokens_T=np.concatenate(tokens).astype(np.int32),
        positions_T=(np.arange(total) - np.repeat(starts_D[:-1], lengths)).astype(np.int32),
        doc_starts_D=starts_D,
        loss_mask_T=np.concatenate([samples[i][1] for i in index_S]).astype(bool),
        logprobs_T=np.zeros(total, dtype=np.float32),
        versions_T=np.full(total, -1, dtype=np.int32),
        advantages_T=np.ones(total, dtype=np.float32),
        temperature_T=np.ones(total, dtype=np.float32),
        sample_T=np.repeat(index_S, lengths).astype(np.int32),
    )


def _metrics(outcome: StepOutcome, seconds: float) -> dict[str, float]:
    names = {"loss": "loss/mean", "grad_norm": "grad/norm", "lr": "optim/lr", "tokens": "tokens/trained"}
    metrics = {short: outcome.metrics[f"trainer/{key}"] for short, key in names.items()}
    return metrics | {"tokens_per_s": metrics["tokens"] / seconds}
