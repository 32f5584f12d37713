"""The auxiliary load-balancing loss (Lepikhin et al., "GShard", 2020; Fedus et al., "Switch Transformers", 2021), off by default.

For each document d and MoE layer, with f_e the share of its (token, choice) pairs that expert e gets and P_e the mean of its probability
over the document's tokens:

    A_d = E · Σ_e f_e · P_e        1 when all experts get the same
    added to the loss:             weight · Σ_layers Σ_d (tokens of d / tokens of the batch) · A_d

By document, as DeepSeek-V3 does (technical report, 2024, section 2.1.2), so that it depends neither on how documents are packed into
rows nor on who trains them. f counts what the router would choose itself, also where other ids are forced, as loss-free balancing does.
It has no gradient; so for each token the loss is linear in its probabilities, and processes that share a document need to add up
counts only.

Shapes: T tokens of a row, t of them in this process, E experts, K experts per token, D documents of the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import StateError
from slipstream.models.context import Auxiliary
from slipstream.models.spec import ModelSpec
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.rows import Span
from slipstream.types import MicroBatch


class AuxLoss:
    """Of one batch."""

    def __init__(self, weight: float, spec: ModelSpec, batch_tokens: int, mesh: Mesh) -> None:
        """`batch_tokens`: of all rows that are trained, in all processes."""
        self.weight, self.spec, self.batch_tokens, self.mesh = weight, spec, batch_tokens, mesh
        self._rows: list[_OfRow] = []

    def of(self, row: MicroBatch, span: Span) -> Auxiliary:
        """For the tokens `span` of `row`, of which other processes hold the rest."""
        self._rows.append(_OfRow(self, row, span))
        return self._rows[-1]

    def mean(self) -> float:
        """A_d, mean over all tokens and layers. Every process calls this. Raises StateError: no layer has attached it."""
        values = [value for row in self._rows for value in row.values.values()]
        if self._rows and not values:
            raise StateError(f"the layers of this {self.spec.family!r} model do not call Context.weigh: trainer.aux_loss reaches no router")
        total = torch.tensor(sum(float(value) for value in values), dtype=torch.float64)
        return float(self.mesh.add_up(total)) / len(self.spec.moe_layers)


class _OfRow:
    def __init__(self, batch: AuxLoss, row: MicroBatch, span: Span) -> None:
        self._batch = batch
        self.values: dict[int, Tensor] = {}
        """By MoE layer: this process's part of Σ_d (tokens of d / tokens of the batch) · A_d. A recomputed layer sets it again."""
        self._length_D = np.diff(row.doc_starts_D)
        self._document_t = torch.from_numpy(np.repeat(np.arange(len(self._length_D)), self._length_D)[span.tokens_t])
        self._share_LDE: dict[int, Tensor] = {}
        """f by layer: counted once, also where the layer is recomputed."""

    def attach(self, moe_layer: int, logits_TE: Tensor, native_TK: Tensor, gates_TK: Tensor) -> Tensor:
        if moe_layer not in self._share_LDE:
            self._share_LDE[moe_layer] = self._shares(native_TK)
        score_tE = _probabilities(logits_TE, self._batch.spec)
        share_tE = self._share_LDE[moe_layer].index_select(0, self._document_t)
        value = (share_tE * score_tE).sum() * (self._batch.spec.num_experts / self._batch.batch_tokens)
        self.values[moe_layer] = value.detach()
        return _Attached.apply(gates_TK, value * self._batch.weight)  # pyright: ignore[reportReturnType]

    def _shares(self, native_tK: Tensor) -> Tensor:
        documents, experts = len(self._length_D), self._batch.spec.num_experts
        pairs = (self._document_t.unsqueeze(1) * experts + native_tK).flatten()
        count_DE = torch.bincount(pairs, minlength=documents * experts).view(documents, experts)
        if self._batch.mesh.config.cp > 1:
            dist.all_reduce(count_DE, group=self._batch.mesh.context_group)
        return count_DE / (native_tK.shape[1] * torch.from_numpy(self._length_D).unsqueeze(1))


def _probabilities(logits_TE: Tensor, spec: ModelSpec) -> Tensor:
    """Of all experts, with sum 1."""
    if spec.router_score == "softmax":
        return logits_TE.softmax(-1)
    score_TE = logits_TE.sigmoid()
    return score_TE / (score_TE.sum(-1, keepdim=True) + 1e-20)


class _Attached(torch.autograd.Function):
    """`gates`, with `loss` in their backward pass: so it runs when the layer's own does, with its weights gathered and recomputed."""

    @staticmethod
    def forward(ctx: Any, gates_TK: Tensor, loss: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.like = loss.new_ones(())
        return gates_TK.view_as(gates_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_TK, ctx.like
