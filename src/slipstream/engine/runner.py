"""Runs the model on one planned step: gathers the flat batch from the slot table, and keeps KV and routing rows of what was processed.

Small models in fp32 and bf16 run in one native call (`engine.fused`). Everything else takes the model's own forward pass with
`PagedContext` at its seams: `attend` writes the new keys and values into the paged cache and attends over it (`select` does the same with
the index keys of sparse attention, and chooses); `route` takes the model's own choice of experts and keeps it. Knows nothing of requests or
sampling.

On the second path, small fp32 batches are padded to four rows with copies of row 0 (same token, position and KV slot, so the same values
are written twice): below four rows, torch's matrix products take another path and a token's result depends on who else is in the batch.

Shape suffixes: T tokens of the step, S sequences, H query heads, G KV heads, d head dim, J index heads, i features of them, L MoE layers,
K experts, E expert count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.engine.fused import bind
from slipstream.engine.kv import KvCache
from slipstream.engine.scheduler import Plan
from slipstream.engine.sequence import SlotTable
from slipstream.models.context import Expand, native_route
from slipstream.models.language_model import LanguageModel
from slipstream.ops import Sight, paged_attention, paged_index, write_index, write_kv
from slipstream.ops.fused import FusedDecoder
from slipstream.ops.logprobs import wide_logits

MIN_ROWS = 4
"""Row-invariant fp32 products need at least this many rows (measured with MKL; bf16 has no such limit)."""


@dataclass(slots=True)
class FlatBatch:
    """What the model and the attention need to know of a step, as arrays."""

    tokens_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    """KV slot of each token: block * block_tokens + offset."""
    block_table_SB: np.ndarray
    query_starts_S1: np.ndarray
    context_S: np.ndarray


class PagedContext:
    """The engine's side of `models.context.Context`, for one pass."""

    def __init__(self, cache: KvCache, batch: FlatBatch, scale: float, written: Callable[[int], None] | None = None) -> None:
        """`written` is called with each layer whose keys and values are all in the cache."""
        self.ids_LTK: list[torch.Tensor] = []
        self._selected: dict[int, torch.Tensor | None] = {}
        self._cache = cache
        self._scale = scale
        self._written = written
        self._slots_T = torch.from_numpy(batch.slots_T)
        self._block_table_SB = torch.from_numpy(batch.block_table_SB)
        self._query_starts_S1 = torch.from_numpy(batch.query_starts_S1)
        self._context_S = torch.from_numpy(batch.context_S)

    def attend(self, layer: int, q_THd: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, sight: Sight | None = None) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        write_kv(k_TGd, v_TGd, keys, values, self._slots_T)
        if self._written is not None:
            self._written(layer)
        return paged_attention(q_THd, keys, values, self._block_table_SB, self._query_starts_S1, self._context_S, self._scale, sight)

    def attend_latent(
        self, layer: int, q_THd: torch.Tensor, latent_TC: torch.Tensor, up: torch.Tensor, expand: Expand, sight: Sight | None = None
    ) -> torch.Tensor:
        return self.attend(layer, q_THd, *expand(latent_TC, up), sight)

    def select(self, layer: int, q_TJi: torch.Tensor, k_Ti: torch.Tensor, weights_TJ: torch.Tensor, top_k: int) -> torch.Tensor | None:
        keys = self._cache.index_keys[layer]
        write_index(k_Ti, keys, self._slots_T)
        batch = self._block_table_SB, self._query_starts_S1, self._context_S
        self._selected[layer] = paged_index(q_TJi, keys, weights_TJ, *batch, top_k)
        return self._selected[layer]

    def selected(self, layer: int) -> torch.Tensor | None:
        return self._selected[layer]

    def route(self, moe_layer: int, scores_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        ids_TK = native_route(scores_TE, top_k)
        self.ids_LTK.append(ids_TK)
        return ids_TK

    def weigh(self, moe_layer: int, logits_TE: torch.Tensor, gates_TK: torch.Tensor) -> torch.Tensor:
        return gates_TK


class Runner:
    """Binds the slot table and the KV cache to a model of this shape."""

    def __init__(self, table: SlotTable, cache: KvCache, head_dim: int, num_experts: int, wide_head: bool = False) -> None:
        """`wide_head`: logits in fp32 of whatever hidden states."""
        self._table = table
        self._cache = cache
        self._wide_head = wide_head
        self._scale = head_dim**-0.5
        self._bound: LanguageModel | None = None
        self._fused: FusedDecoder | None = None
        self._min_rows = 1
        self._offsets_L11 = (np.arange(cache.num_moe_layers) * num_experts)[:, None, None]
        self.expert_load_LE = np.zeros((cache.num_moe_layers, num_experts if cache.num_moe_layers else 0), np.int64)
        """Tokens that each expert has processed."""

    def run(self, model: LanguageModel, plan: Plan, written: Callable[[int], None] | None = None) -> torch.Tensor:
        """Process the planned tokens. Returns fp32 logits of the sequences that sample, in plan order (none: 0 rows): of the last known
        token, and of each guess behind it.

        `written` is called with each layer, in order, once the cache has all its keys and values; by the fused kernel not at all.
        """
        if model is not self._bound:
            self._bound, self._fused = model, bind(model, self._cache, self.expert_load_LE, self._wide_head)
            narrow = model.dtype != torch.float32 and not self._wide_head
            self._min_rows = 1 if narrow or self._fused is not None else MIN_ROWS
        batch = self._flat(plan)
        hidden_TD = (
            self._forward_fused(self._fused, batch) if self._fused is not None else self._forward(model, batch, plan.num_tokens, written)
        )
        if plan.num_tokens == plan.num_decode:
            return self._logits(model, hidden_TD)[: plan.num_tokens]
        ends_S, rows_S = batch.query_starts_S1[1 : len(plan.slots_S) + 1], plan.samples_S * (1 + plan.drafts_S)
        rows = np.arange(rows_S.sum()) + np.repeat(ends_S - np.cumsum(rows_S), rows_S)
        if not len(rows):
            return torch.zeros(0, model.spec.vocab_size)
        padded = np.concatenate([rows, np.repeat(rows[:1], max(0, self._min_rows - len(rows)))])
        return self._logits(model, hidden_TD[torch.from_numpy(padded)])[: len(rows)]

    def _logits(self, model: LanguageModel, hidden_TD: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused.logits(hidden_TD)
        return wide_logits(hidden_TD, model.head_weight) if self._wide_head else model.logits(hidden_TD).float()

    def uncount(self, slots_T: np.ndarray) -> None:
        """Tokens that the last step processed in these KV slots are not part of any sequence: take them out of the experts' load."""
        if self._cache.num_moe_layers:
            self._count(self._cache.routing[slots_T].transpose(1, 0, 2), -1)

    def _forward_fused(self, fused: FusedDecoder, b: FlatBatch) -> torch.Tensor:
        return fused.forward(b.tokens_T, b.positions_T, b.slots_T, b.block_table_SB, b.query_starts_S1, b.context_S)

    def _forward(self, model: LanguageModel, batch: FlatBatch, num_tokens: int, written: Callable[[int], None] | None) -> torch.Tensor:
        context = PagedContext(self._cache, batch, self._scale, written)
        hidden_TD = model(torch.from_numpy(batch.tokens_T), torch.from_numpy(batch.positions_T), context)
        if context.ids_LTK and self._cache.num_moe_layers:
            self._capture(context.ids_LTK, batch.slots_T[:num_tokens])
        return hidden_TD

    def _flat(self, plan: Plan) -> FlatBatch:
        table, block_tokens = self._table, self._table.block_tokens
        pad = max(0, self._min_rows - plan.num_tokens)
        slots_S, first_S = plan.slots_S, table.context_R[plan.slots_S]
        context_S = first_S + plan.counts_S
        if plan.num_tokens == plan.num_decode:
            slot_T, position_T = slots_S, first_S
            starts_S1 = np.arange(len(slots_S) + 1, dtype=np.int32)
        else:
            starts_S1 = np.zeros(len(slots_S) + 1, np.int32)
            np.cumsum(plan.counts_S, out=starts_S1[1:])
            slot_T = np.repeat(slots_S, plan.counts_S)
            position_T = np.arange(plan.num_tokens, dtype=np.int32) + np.repeat(first_S - starts_S1[:-1], plan.counts_S)
        if pad:
            slot_T, position_T = (np.concatenate([x, np.repeat(x[:1], pad)]) for x in (slot_T, position_T))
            slots_S = np.concatenate([slots_S, np.repeat(slots_S[:1], pad)])
            context_S = np.concatenate([context_S, np.repeat(first_S[:1] + 1, pad)])
            starts_S1 = np.concatenate([starts_S1, starts_S1[-1] + np.arange(1, pad + 1, dtype=np.int32)])
        width = (int(context_S.max()) - 1) // block_tokens + 1
        kv_slots_T = table.kv_slots(slot_T, position_T)
        return FlatBatch(
            tokens_T=table.tokens_RT[slot_T, position_T].astype(np.int64),
            positions_T=position_T.astype(np.int64),
            slots_T=kv_slots_T,
            block_table_SB=table.blocks_RB[:, :width].take(slots_S, axis=0),
            query_starts_S1=starts_S1,
            context_S=context_S.astype(np.int32),
        )

    def _capture(self, ids: list[torch.Tensor], slots_T: np.ndarray) -> None:
        ids_LTK = torch.stack(ids)[:, : len(slots_T)].numpy()
        self._cache.routing[slots_T] = ids_LTK.transpose(1, 0, 2)
        self._count(ids_LTK, 1)

    def _count(self, ids_LTK: np.ndarray, times: int) -> None:
        counts = np.bincount((ids_LTK + self._offsets_L11).ravel(), minlength=self.expert_load_LE.size)
        self.expert_load_LE += times * counts.reshape(self.expert_load_LE.shape)
