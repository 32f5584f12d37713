"""One optimizer step on one batch: shared by RL and SFT (which is a policy gradient with advantage 1 on given tokens).

Each row is run forward and backward on its own; its summed loss is divided by the loss tokens of the *whole* batch, so a token weighs
the same however the batch was cut into rows, and whichever process of the trainer ran them. Knows nothing of files, waiting, versions
on disk or metrics lines.

Shapes: T tokens of a row, t of them in this process, N that carry loss, n of those that are predicted here, D hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.losses import loss_fn
from slipstream.config.train import OptimConfig, TrainerConfig
from slipstream.errors import StateError
from slipstream.models.decoder import Decoder
from slipstream.models.impl import Impl
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import build_model, load_model
from slipstream.models.lora import Adapters
from slipstream.models.spec import ModelSpec
from slipstream.models.tensor_file import TensorStream
from slipstream.ops import token_logprobs
from slipstream.parallel.apply import parallelise
from slipstream.parallel.context import across, gather_tokens
from slipstream.parallel.fsdp import clip_gradients
from slipstream.parallel.mesh import ALONE, Mesh
from slipstream.parallel.pieces import Piece, boxes
from slipstream.parallel.pipeline import StageRun, run_pipeline
from slipstream.parallel.rows import Span, own_rows, spans, take
from slipstream.trainer import holdings
from slipstream.trainer.aux_loss import AuxLoss
from slipstream.trainer.away import Away
from slipstream.trainer.fit import check_trains
from slipstream.trainer.lora import LoraWeights
from slipstream.trainer.memory import Trimmer
from slipstream.trainer.optim import learning_rate, make_optimizer, set_learning_rate
from slipstream.trainer.precision import Weights
from slipstream.trainer.routing import RoutingStats, balance, row_context
from slipstream.trainer.shards import Stored
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
    """A policy and its optimizer. `step` is the only thing that changes the weights.

    One in each process of the trainer; all of them call every method together, with the same arguments.
    """

    def __init__(self, model: LanguageModel, config: TrainerConfig, optim: OptimConfig, max_steps: int, mesh: Mesh = ALONE) -> None:
        """`model` holds float32 weights, all of them, or, of several processes, is on the meta device and gets its part by `load`.

        Raises ConfigError: the model cannot do what `config` asks for.
        """
        _prepare(model, config, optim)
        self._layout = holdings.Layout(model, mesh)
        self.config, self.optim, self.max_steps, self.mesh = config, optim, max_steps, mesh
        self._dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        if config.lora is None:
            self.weights = Weights(model, config, mesh)
        else:
            assert isinstance(model, Decoder)  # `trainer.fit`
            self.weights = LoraWeights(model, config, config.lora, mesh)
        parallelise(self.weights.compute, mesh, self._dtype, config)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device="cpu")
        self.weights.sharded()
        if isinstance(self.weights, LoraWeights):
            self.weights.attach()
        self._plan = boxes(self._layout.weights(model), mesh)
        away = Away(config.offload.folder) if config.offload.moments else None
        self.optimizer = make_optimizer(self.weights.trained, self.weights.columns, optim, away)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in self.weights.trained.items()}
        self._loss_fn, self._memory = loss_fn(config.loss), Trimmer()

    def step(self, batch: Batch) -> StepOutcome:
        """Train on one batch. A non-finite loss or gradient leaves the weights as they are and names the problem."""
        rate = learning_rate(self.optim, batch.step, self.max_steps)
        sums, routing = self.accumulate(batch)
        norm = clip_gradients(self.weights.parameters, self.optim.clip_norm, self.mesh if self.adapters is None else ALONE)
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
        rows = [row for row in batch.micro_batches if row.loss_mask_T.any()]
        even = AuxLoss(self.config.aux_loss, self.weights.master.spec, sum(row.num_tokens for row in rows), self.mesh)
        own = own_rows(rows, self.mesh)
        if self.mesh.config.pp == 1:
            for row in own:
                self._row(row, self.weights.compute, batch, sums, routing, even).backward()
        else:
            model = self.weights.compute
            assert isinstance(model, Decoder)  # others run alone: `trainer.fit`
            lengths = [spans(row.doc_starts_D, self.mesh.config)[self.mesh.context].num_tokens for row in own]
            run_pipeline(model, self.mesh, lengths, self._dtype, lambda i, run: self._row(own[i], run, batch, sums, routing, even))
        sums.combine(self.mesh)
        routing.combine(self.mesh)
        if isinstance(self.weights, LoraWeights):
            self.weights.combine()
        routing.aux_loss = even.mean() if self.config.aux_loss else None
        return sums, routing

    @property
    def adapters(self) -> Adapters | None:
        """What alone trains with [trainer.lora]."""
        return self.weights.adapters if isinstance(self.weights, LoraWeights) else None

    def load(self, folder: Path) -> None:
        """Take this process's part of the weights of an HF folder. Raises ModelError: it does not fit, or is damaged."""
        self._layout.load(self.weights.master, folder)
        self.weights.sync()

    def published(self) -> TensorStream:
        """The weights that the next step trains from, in the compute dtype, under HF names. Only the leading process gets them."""
        return self._exported(self.weights.compute, self._dtype)

    def masters(self) -> TensorStream:
        """What trains, in float32: the weights under HF names, or the adapters under PEFT's. Only the leading process gets them."""
        if self.adapters is None:
            return self._exported(self.weights.master)
        return TensorStream.of(self.adapters.tensors() if self.mesh.leads else {})

    def state(self) -> dict[str, Piece]:
        """What this process holds of what a checkpoint stores."""
        return self._layout.state(self.weights.trained, self.optimizer, self.names)

    def restore(self, stored: Stored) -> None:
        """The inverse of `state`, for any number of processes. Raises ModelError: it is of another model."""
        self._layout.restore(self.weights.trained, self.optimizer, self.names, stored)
        self.weights.sync()

    def _exported(self, model: LanguageModel, dtype: torch.dtype | None = None) -> TensorStream:
        plan = boxes(self._layout.weights(model), self.mesh) if self.mesh.alone else self._plan
        return self._layout.export(model, plan, dtype)

    def _row(
        self, row: MicroBatch, run: LanguageModel | StageRun, batch: Batch, sums: TokenSums, routing: RoutingStats, even: AuxLoss
    ) -> Tensor:
        """The loss of one row, to run backward from; where `run` is a stage before the last of a pipeline, the hidden states [t, D]."""
        parts = spans(row.doc_starts_D, self.mesh.config)
        own = parts[self.mesh.context]
        here = take(row, own)
        context = row_context(here, run.spec, self.config.router_replay, even.of(row, own) if self.config.aux_loss else None)
        seen = across(context, row, parts, self.mesh)
        hidden_tD = run(torch.tensor(here.tokens_T), torch.tensor(here.positions_T), seen)
        routing.add(here, context, self.config.router_replay)
        if isinstance(run, StageRun) and not run.stage.is_last:
            return hidden_tD
        at_N = row.loss_mask_T.nonzero()[0]
        logprobs_N, entropy_N = self._logprobs(hidden_tD, row, parts, at_N)
        if not len(at_N):  # adds nothing, but the exchanges of the backward pass take all processes
            return logprobs_N.sum()
        engine_N, advantages_N = torch.tensor(row.logprobs_T[at_N]), torch.tensor(row.advantages_T[at_N])
        mask_N, sample_N = torch.ones(len(at_N), dtype=torch.bool), torch.tensor(row.sample_T[at_N])
        output = self._loss_fn(logprobs_N, engine_N, advantages_N, mask_N, sample_N)
        if self.mesh.context == 0:  # the other processes of the row see the same loss tokens
            sums.add(output, logprobs_N.detach(), engine_N, entropy_N, torch.tensor(batch.version - row.versions_T[at_N]))
        return output.loss_T.sum() / batch.loss_tokens

    def _logprobs(self, hidden_tD: Tensor, row: MicroBatch, parts: Sequence[Span], at_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """log p and entropy of the tokens `at_N` of the row, with gradient for those that are predicted here. `parts`: its spans.

        The hidden state before a token predicts it; a document's first token never carries loss, so at - 1 is in its document, though it
        may be in another process. Each process then computes the loss of the whole row (some losses need all tokens of a sample).
        """
        own_PN = [span.own(at_N) for span in parts]
        own_N, span = own_PN[self.mesh.context], parts[self.mesh.context]
        at_n = at_N[own_N]
        hidden_nD = hidden_tD.index_select(0, torch.from_numpy(span.before(at_n)))
        targets_n, temperature_n = torch.tensor(row.tokens_T[at_n]), torch.tensor(row.temperature_T[at_n])
        head = self.weights.compute.head_weight
        if self.config.head_dtype == "float32":
            hidden_nD, head = hidden_nD.float(), head.float()
        logprobs_n, entropy_n = token_logprobs(hidden_nD, head, targets_n, temperature_n, self.config.logprob_chunk_tokens)
        if len(parts) == 1 or not len(at_N):
            return logprobs_n, entropy_n
        logprobs_N, entropy_N = gather_tokens(torch.stack((logprobs_n, entropy_n), 1), own_PN, self.mesh).unbind(1)
        return logprobs_N.index_copy(0, torch.from_numpy(own_N.nonzero()[0]), logprobs_n), entropy_N


def learner_of(folder: Path, config: TrainerConfig, optim: OptimConfig, max_steps: int, mesh: Mesh = ALONE, impl: Impl = "auto") -> Learner:
    """A learner of the model in an HF folder; no process of several reads more than it keeps. Raises ModelError, ConfigError.

    Adapters start from the whole base, and transformers' modules have their memory when they are built: these are cut afterwards.
    """
    if mesh.alone or config.lora is not None or impl == "hf":
        return Learner(load_model(folder, impl=impl), config, optim, max_steps, mesh)
    learner = Learner(build_model(ModelSpec.from_folder(folder), device="meta"), config, optim, max_steps, mesh)
    learner.load(folder)
    return learner


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


def _prepare(model: LanguageModel, config: TrainerConfig, optim: OptimConfig) -> None:
    check_trains(config, optim, model.spec)
    if config.freeze_router:
        for parameter in model.router_parameters:
            parameter.requires_grad_(False)
