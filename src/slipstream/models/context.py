"""The two seams of a forward pass: who attends to what, and who chooses the experts.

A decoder calls them and knows nothing else of training or serving. `FullContext` is the training side: packed documents, attention
within documents, router replay. The engine has its own, over a paged cache.

Shapes: T tokens, H query heads, G key/value heads, d head features, J index heads, i features of them, E experts, K experts per token,
L MoE layers, D documents, C features of a short vector, of which keys and values are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from slipstream.errors import StateError
from slipstream.ops import DocLayout, Sight, doc_attention, doc_index
from slipstream.ops.attention import Documents

Expand: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(short vectors [T, C], the weight that lengthens them) -> keys and values, each [T, G, d]."""


class Context(Protocol):
    """What a forward pass needs from outside. One context serves one pass."""

    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        """Attention output [T, H, d] of decoder layer `layer`; q and k are normed and rotated. Scores are scaled by d^-1/2.

        `sight`: windows, sinks, chosen tokens; None: every token sees all of its past.
        """
        ...

    def attend_latent(self, layer: int, q_THd: Tensor, latent_TC: Tensor, up: Tensor, expand: Expand, sight: Sight | None = None) -> Tensor:
        """`attend` with the keys and values `expand(latent, up)`, for a context that would rather move or keep the short vectors."""
        ...

    def select(self, layer: int, q_TJi: Tensor, k_Ti: Tensor, weights_TJ: Tensor, top_k: int) -> Tensor | None:
        """What the tokens of `layer` see, for `Sight.selected_TK`; None: all of their past. Sparse attention only, see `ops.indexer`."""
        ...

    def selected(self, layer: int) -> Tensor | None:
        """What `select` returned for `layer` in this pass: later layers may share it."""
        ...

    def route(self, moe_layer: int, scores_TE: Tensor, top_k: int) -> Tensor:
        """Expert ids [T, K] for the `moe_layer`-th MoE layer. The `top_k` highest of `scores` (fp32, without gradient: logits, or scores
        with the routing bias and -inf where a group is out, see `models.router`) are the model's own choice.

        The model computes the gate weights from its own logits at these ids, so a context that forces ids leaves the router trainable.
        """
        ...

    def weigh(self, moe_layer: int, logits_TE: Tensor, gates_TK: Tensor) -> Tensor:
        """The gate weights [T, K], as they came: here a context may attach a loss on the router's logits, see `trainer.aux_loss`."""
        ...


class Auxiliary(Protocol):
    """A loss on the router of each MoE layer."""

    def attach(self, moe_layer: int, logits_TE: Tensor, native_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """`gates`, whose backward pass also takes the gradient of the loss; `native`: what the router would choose by itself."""
        ...


def native_route(scores_TE: Tensor, top_k: int) -> Tensor:
    """The model's own choice: the `top_k` highest scores, best first."""
    return scores_TE.detach().topk(top_k, dim=-1).indices


class FullContext:
    """Whole documents laid end to end in one row: training, scoring, parity tests.

    With `forced_ids_TLK` the rows of `valid_T` use those experts (router replay: Ma et al., "Stabilizing MoE Reinforcement Learning by
    Aligning Training and Inference Routers", 2025) and the other rows route natively. `record=True` keeps both the used and the native
    ids of the pass.
    """

    def __init__(
        self,
        docs: Documents,
        forced_ids_TLK: Tensor | None = None,
        valid_T: Tensor | None = None,
        record: bool = False,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        """`docs`: a `DocLayout`, or first token of each document and the row length (D + 1 values).

        `forced_ids_TLK`: any integer type, on the device of the model. `valid_T`: bool; None means that all rows are valid.
        `auxiliary` needs `record`.
        """
        self._layout = docs if isinstance(docs, DocLayout) else DocLayout(docs)
        self._forced_LTK = None if forced_ids_TLK is None else forced_ids_TLK.permute(1, 0, 2).long()
        all_valid = valid_T is None or bool(valid_T.all())
        self._valid_T1 = None if valid_T is None or all_valid else valid_T.unsqueeze(-1)
        self._record, self._auxiliary = record, auxiliary
        self._selected: dict[int, Tensor | None] = {}
        self._used: dict[int, Tensor] = {}
        self._native: dict[int, Tensor] = {}

    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        return doc_attention(q_THd, k_TGd, v_TGd, self._layout, q_THd.shape[-1] ** -0.5, sight)

    def attend_latent(self, layer: int, q_THd: Tensor, latent_TC: Tensor, up: Tensor, expand: Expand, sight: Sight | None = None) -> Tensor:
        return self.attend(layer, q_THd, *expand(latent_TC, up), sight)

    def select(self, layer: int, q_TJi: Tensor, k_Ti: Tensor, weights_TJ: Tensor, top_k: int) -> Tensor | None:
        self._selected[layer] = doc_index(q_TJi, k_Ti, weights_TJ, self._layout, top_k)
        return self._selected[layer]

    def selected(self, layer: int) -> Tensor | None:
        return self._selected[layer]

    def route(self, moe_layer: int, scores_TE: Tensor, top_k: int) -> Tensor:
        forced_TK = None if self._forced_LTK is None else self._forced_LTK[moe_layer]
        if forced_TK is not None and self._valid_T1 is None and not self._record:
            return forced_TK
        native_TK = native_route(scores_TE, top_k)
        if forced_TK is None:
            ids_TK = native_TK
        elif self._valid_T1 is None:
            ids_TK = forced_TK
        else:
            ids_TK = torch.where(self._valid_T1, forced_TK, native_TK)
        if self._record:
            self._used[moe_layer], self._native[moe_layer] = ids_TK, native_TK
        return ids_TK

    def weigh(self, moe_layer: int, logits_TE: Tensor, gates_TK: Tensor) -> Tensor:
        if self._auxiliary is None:
            return gates_TK
        return self._auxiliary.attach(moe_layer, logits_TE, self._native[moe_layer], gates_TK)

    @property
    def moe_layers(self) -> list[int]:
        """Which MoE layers the recorded pass went through, ascending: L below. All of them, but for a stage of a pipeline."""
        return sorted(self._used)

    @property
    def ids_TLK(self) -> Tensor:
        """Experts used in the recorded pass."""
        return self._stack(self._used)

    @property
    def native_ids_TLK(self) -> Tensor:
        """Experts that the model's own scores would have chosen in the recorded pass."""
        return self._stack(self._native)

    def _stack(self, ids: dict[int, Tensor]) -> Tensor:
        if not ids:
            raise StateError("no routing was recorded: make the context with record=True and run an MoE model with it")
        return torch.stack([ids[layer] for layer in sorted(ids)], dim=1)
