"""One optimizer step on one batch: shared by RL and SFT (which is a policy gradient with advantage 1 on given tokens).

Each row is run forward and backward on its own; its summed loss is divided by the loss tokens of the *whole* batch, so a token weighs
the same however the batch was cut into rows. Knows nothing of files, waiting, versions on disk or metrics lines.

Shapes: T tokens of a row, N of them that carry loss, D hidden features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.losses import LossOutput, k3, loss_fn
from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.errors import ConfigError, StateError
from slipstream.models.decoder import Decoder
from slipstream.ops import token_logprobs
from slipstream.trainer.optim import learning_rate, make_optimizer, set_learning_rate
from slipstream.trainer.precision import Weights
from slipstream.trainer.routing import RoutingStats, row_context
from slipstream.types import Batch, MicroBatch


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did."""

    metrics: dict[str, float]
    """By registered key."""
    load_LE: np.ndarray
    """Share of each MoE layer's tokens that went to each expert; empty for a dense model."""
    problem: str = ""
    """Why the step was skipped (the weights are unchanged); '' when it was taken."""


class Learner:
    """A policy and its optimizer. `step` is the only thing that changes the weights."""

    def __init__(self, model: Decoder, config: TrainerConfig, optim: OptimConfig, max_steps: int) -> None:
        """`model` holds float32 weights. Raises ConfigError: the model cannot do what `config` asks for."""
        _prepare(model, config)
        self.config, self.optim, self.max_steps = config, optim, max_steps
        self.weights = Weights(model, getattr(torch, config.dtype))
        if config.recompute:
            _recompute_layers(self.weights.compute)
        self.optimizer = make_optimizer(model.parameters(), optim)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self._loss_fn = loss_fn(config.loss)

    def step(self, batch: Batch) -> StepOutcome:
        """Train on one batch. A non-finite loss or gradient leaves the weights as they are and names the problem."""
        _check(batch)
        rate = learning_rate(self.optim, batch.step, self.max_steps)
        sums, routing = _TokenSums(), RoutingStats(self.weights.master.spec)
        self.optimizer.zero_grad(set_to_none=True)
        for row in batch.micro_batches:
            self._row(row, batch, sums, routing)
        norm = float(nn.utils.clip_grad_norm_(self.weights.parameters, self.optim.clip_norm, foreach=True))
        loss = sums.loss / max(1, batch.loss_tokens)
        problem = _problem(batch, loss, norm)
        if not problem:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.weights.sync()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = {
            "trainer/loss/mean": loss,
            "trainer/grad/norm": norm,
            "trainer/optim/lr": rate,
            "trainer/step/skipped": float(bool(problem)),
        }
        load_LE = routing.load_LE / np.maximum(1, routing.load_LE.sum(1, keepdims=True))
        return StepOutcome(metrics | _sizes(batch) | sums.metrics() | routing.metrics(), load_LE, problem)

    def _row(self, row: MicroBatch, batch: Batch, sums: _TokenSums, routing: RoutingStats) -> None:
        """Forward and backward of one row; gradients add up in the parameters."""
        if not row.loss_mask_T.any():
            return
        model = self.weights.compute
        context = row_context(row, model.spec, self.config.router_replay)
        hidden_TD = model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), context)
        at_N = row.loss_mask_T.nonzero()[0]
        # The hidden state before a token predicts it; a document's first token never carries loss, so at - 1 is in its document.
        hidden_ND = hidden_TD.index_select(0, torch.from_numpy(at_N - 1))
        targets_N, temperature_N = torch.tensor(row.tokens_T[at_N]), torch.tensor(row.temperature_T[at_N])
        logprobs_N, entropy_N = token_logprobs(hidden_ND, model.head_weight, targets_N, temperature_N, self.config.logprob_chunk_tokens)
        engine_N, advantages_N = torch.tensor(row.logprobs_T[at_N]), torch.tensor(row.advantages_T[at_N])
        mask_N, sample_N = torch.ones(len(at_N), dtype=torch.bool), torch.tensor(row.sample_T[at_N])
        output = self._loss_fn(logprobs_N, engine_N, advantages_N, mask_N, sample_N)
        (output.loss_T.sum() / batch.loss_tokens).backward()
        sums.add(output, logprobs_N.detach(), engine_N, entropy_N, torch.tensor(batch.version - row.versions_T[at_N]))
        routing.add(row, context, self.config.router_replay)


class _TokenSums:
    """Sums over the loss tokens of a batch, in float64."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._count = self._fresh_count = 0
        self._kl = self._fresh_kl = self._entropy = self._lag = 0.0
        self._extreme = self._masked = self._lag_max = 0

    @torch.no_grad()
    def add(self, output: LossOutput, logprobs_N: Tensor, engine_N: Tensor, entropy_N: Tensor, lag_N: Tensor) -> None:
        kl_N, log_ratio_N, fresh_N = k3(logprobs_N, engine_N), logprobs_N - engine_N, lag_N == 0
        self.loss += float(output.loss_T.sum(dtype=torch.float64))
        self._count += len(kl_N)
        self._kl += float(kl_N.sum(dtype=torch.float64))
        self._fresh_count += int(fresh_N.sum())
        self._fresh_kl += float(kl_N[fresh_N].sum(dtype=torch.float64))
        self._extreme += int((log_ratio_N.abs() > np.log(2.0)).sum())
        self._masked += int(output.masked_T.sum())
        self._entropy += float(entropy_N.sum(dtype=torch.float64))
        self._lag += float(lag_N.sum())
        self._lag_max = max(self._lag_max, int(lag_N.max()))

    def metrics(self) -> dict[str, float]:
        """Means; the split of the mismatch KL names only the parts that have tokens."""
        count, stale = self._count, self._count - self._fresh_count
        if not count:
            return {}
        metrics = {
            "trainer/mismatch_kl/mean": self._kl / count,
            "trainer/ratio/extreme_frac": self._extreme / count,
            "trainer/ratio/masked_frac": self._masked / count,
            "trainer/entropy/mean": self._entropy / count,
            "trainer/lag/mean": self._lag / count,
            "trainer/lag/max": float(self._lag_max),
        }
        if self._fresh_count:
            metrics["trainer/mismatch_kl/fresh"] = self._fresh_kl / self._fresh_count
        if stale:
            metrics["trainer/mismatch_kl/stale"] = (self._kl - self._fresh_kl) / stale
        return metrics


def _sizes(batch: Batch) -> dict[str, float]:
    return {
        "trainer/tokens/trained": float(batch.num_tokens),
        "trainer/tokens/loss": float(batch.loss_tokens),
        "trainer/samples/trained": float(len(batch.rollout_ids)),
    }


def _problem(batch: Batch, loss: float, norm: float) -> str:
    if not batch.loss_tokens:
        return "no token of the batch carries loss"
    if not np.isfinite(loss):
        return f"the loss is {loss}"
    return "" if np.isfinite(norm) else f"the gradient norm is {norm}"


def _check(batch: Batch) -> None:
    counted = sum(int(row.loss_mask_T.sum()) for row in batch.micro_batches)
    if counted != batch.loss_tokens:
        raise StateError(f"batch of step {batch.step} says {batch.loss_tokens} loss tokens, its rows hold {counted}")
    if any(row.loss_mask_T[row.doc_starts_D[:-1]].any() for row in batch.micro_batches):
        raise StateError(f"batch of step {batch.step}: a document's first token carries loss, but nothing before it predicts it")


def _prepare(model: Decoder, config: TrainerConfig) -> None:
    if config.balance_rate:
        raise ConfigError(
            f"trainer.balance_rate = {config.balance_rate}: loss-free balancing moves a routing bias, and models of the family "
            f"{model.spec.family!r} have none; set trainer.balance_rate = 0 (or trainer.freeze_router = true against drift)"
        )
    if config.freeze_router:
        for name, parameter in model.named_parameters():
            if name.endswith(".router"):
                parameter.requires_grad_(False)


def _recompute_layers(model: Decoder) -> None:
    """Drop each layer's activations after the forward pass and compute them again in the backward pass (arXiv 1604.06174)."""
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False, preserve_rng_state=False)
