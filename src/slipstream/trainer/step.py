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

from slipstream.algorithms.losses import loss_fn
from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.errors import ConfigError, StateError
from slipstream.models.decoder import Decoder
from slipstream.models.matrices import fused_columns
from slipstream.ops import token_logprobs
from slipstream.trainer.memory import Trimmer
from slipstream.trainer.optim import learning_rate, make_optimizer, set_learning_rate
from slipstream.trainer.precision import Weights
from slipstream.trainer.routing import RoutingStats, balance, row_context
from slipstream.trainer.sums import TokenSums
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
        self.weights = Weights(model, config)
        if config.recompute:
            _recompute_layers(self.weights.compute)
        self.optimizer = make_optimizer(dict(model.named_parameters()), fused_columns(model.names, model.spec), optim)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._loss_fn, self._memory = loss_fn(config.loss), Trimmer()

    def step(self, batch: Batch) -> StepOutcome:
        """Train on one batch. A non-finite loss or gradient leaves the weights as they are and names the problem."""
        rate = learning_rate(self.optim, batch.step, self.max_steps)
        sums, routing = self.accumulate(batch)
        norm = float(nn.utils.clip_grad_norm_(self.weights.parameters, self.optim.clip_norm, foreach=True))
        loss = sums.loss / max(1, batch.loss_tokens)
        problem = _problem(batch, loss, norm)
        if not problem:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            if self.config.balance_rate:
                balance(self.weights.master, routing.native_LE, self.config.balance_rate)
            self.weights.sync()
        self.optimizer.zero_grad(set_to_none=True)
        self._memory.trim()
        own = {"loss/mean": loss, "grad/norm": norm, "optim/lr": rate, "step/skipped": float(bool(problem))}
        metrics = {f"trainer/{key}": value for key, value in own.items()} | _sizes(batch) | sums.metrics() | routing.metrics()
        return StepOutcome(metrics | self.weights.metrics(), routing.shares(), problem)

    def accumulate(self, batch: Batch) -> tuple[TokenSums, RoutingStats]:
        """Gradients of the mean loss over the batch's loss tokens, unclipped, in the master weights. `step` does this first."""
        _check(batch)
        sums, routing = TokenSums(), RoutingStats(self.weights.master.spec)
        self.optimizer.zero_grad(set_to_none=True)
        for row in batch.micro_batches:
            if row.loss_mask_T.any():
                self._row(row, batch, sums, routing)
        return sums, routing

    def _row(self, row: MicroBatch, batch: Batch, sums: TokenSums, routing: RoutingStats) -> None:
        """Forward and backward of one row; gradients add up in the parameters."""
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
    if config.balance_rate and config.freeze_router:
        raise ConfigError(
            f"trainer.balance_rate = {config.balance_rate} moves the routing bias, and trainer.freeze_router = true holds the router: "
            "choose one of them"
        )
    if config.balance_rate and not model.spec.router_bias:
        raise ConfigError(
            f"trainer.balance_rate = {config.balance_rate}: loss-free balancing moves a routing bias, and models of the family "
            f"{model.spec.family!r} have none; set trainer.balance_rate = 0 (or trainer.freeze_router = true against drift)"
        )
    if config.freeze_router:
        for name, parameter in model.named_parameters():
            if name.endswith((".router", ".router_logit_bias")):
                parameter.requires_grad_(False)


def _recompute_layers(model: Decoder) -> None:
    """Drop each layer's activations after the forward pass and compute them again in the backward pass (arXiv 1604.06174)."""
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False, preserve_rng_state=False)
