"""Router replay and what it tells: contexts with forced experts, expert load, how often the trainer would have routed otherwise. And
what keeps the load even: the routing bias.

The forced ids are the engine's; gate weights stay the trainer's own, so the router keeps its gradient (models.context).
Shapes: T tokens, L MoE layers, E experts, K experts per token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.models.context import Auxiliary, FullContext
from slipstream.models.language_model import LanguageModel
from slipstream.models.layers import MoE
from slipstream.models.spec import ModelSpec
from slipstream.parallel.mesh import Mesh
from slipstream.types import MicroBatch


def row_context(row: MicroBatch, spec: ModelSpec, replay: bool, auxiliary: Auxiliary | None = None) -> FullContext:
    """Attention within the documents of `row`; experts forced on its valid routing rows, native elsewhere."""
    record = bool(spec.moe_layers)
    if not (record and replay and row.routing_TLK is not None and row.routing_valid_T is not None and row.routing_valid_T.any()):
        return FullContext(row.doc_starts_D, record=record, auxiliary=auxiliary)
    forced_TLK = torch.from_numpy(row.routing_TLK.astype(np.int64))
    return FullContext(row.doc_starts_D, forced_TLK, torch.tensor(row.routing_valid_T), record=True, auxiliary=auxiliary)


class RoutingStats:
    """Sums over the rows of one batch. Read from what the context recorded, so a recomputed layer is not counted twice."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.load_LE = np.zeros((len(spec.moe_layers), spec.num_experts), dtype=np.int64)
        """(token, choice) pairs sent to each expert."""
        self.native_LE = np.zeros_like(self.load_LE)
        """Pairs that the trainer's own router would have sent there, forced or not."""
        self.aux_loss: float | None = None
        """Mean over tokens and layers, where there is one (`trainer.aux_loss`)."""
        self._routed = self._replayed = self._flipped = 0
        """Times that a token was routed, once in each MoE layer; of these with forced ids; of these to others than its own."""

    def add(self, row: MicroBatch, context: FullContext, replay: bool) -> None:
        """Count the layers that the pass of `context` went through."""
        layers = context.moe_layers
        if not layers:
            return
        ids_TLK, native_TLK = context.ids_TLK, context.native_ids_TLK
        self.load_LE[layers] += _load(ids_TLK, self._spec.num_experts)
        self.native_LE[layers] += _load(native_TLK, self._spec.num_experts)
        self._routed += row.num_tokens * len(layers)
        if replay and row.routing_valid_T is not None:
            self._replayed += int(row.routing_valid_T.sum()) * len(layers)
            same_TL = (ids_TLK.unsqueeze(3) == native_TLK.unsqueeze(2)).any(3).all(2)
            self._flipped += int((~same_TL).sum())

    def combine(self, mesh: Mesh) -> None:
        """Add up over all processes, each of which has counted tokens and layers of its own."""
        counts = np.concatenate([self.load_LE.ravel(), self.native_LE.ravel(), [self._routed, self._replayed, self._flipped]])
        total = mesh.add_up(torch.from_numpy(counts)).numpy()
        self.load_LE, self.native_LE = total[:-3].reshape(2, *self.load_LE.shape)
        self._routed, self._replayed, self._flipped = total[-3:].tolist()

    def shares(self) -> np.ndarray:
        """Share of each MoE layer's tokens that went to each expert [L, E]; empty for a dense model."""
        return self.load_LE / np.maximum(1, self.load_LE.sum(1, keepdims=True))

    def metrics(self) -> dict[str, float]:
        """Empty for a dense model."""
        if not self._routed:
            return {}
        busiest_L = self.load_LE.max(1) / self.load_LE.mean(1)
        return {
            "trainer/replay/coverage_frac": self._replayed / self._routed,
            "trainer/replay/flip_frac": self._flipped / max(1, self._replayed),
            "trainer/balance/imbalance": float(busiest_L.mean()),
            **({} if self.aux_loss is None else {"trainer/balance/aux_loss": self.aux_loss}),
        }


@torch.no_grad()
def balance(model: LanguageModel, load_LE: np.ndarray, rate: float) -> None:
    """Loss-free balancing: b += rate · sign(mean load - load), for every expert of every MoE layer here (arXiv 2408.15664, algorithm 1).

    `load_LE` counts the whole batch, whatever the rows, by the choice of this router: what the bias controls. Forced ids are those of
    routers some versions old, with older biases; a controller that is fed with them reacts late and swings.
    """
    for moe in model.modules():
        if isinstance(moe, MoE) and moe.router_bias is not None:
            load_E = load_LE[moe.moe_layer]
            moe.router_bias.add_(torch.from_numpy(np.sign(load_E.mean() - load_E)), alpha=rate)


def _load(ids_TLK: Tensor, num_experts: int) -> np.ndarray:
    num_layers = ids_TLK.shape[1]
    offset_L1 = torch.arange(num_layers).unsqueeze(1) * num_experts
    counts = torch.bincount((ids_TLK + offset_L1).flatten(), minlength=num_layers * num_experts)
    return counts.view(num_layers, num_experts).numpy()
