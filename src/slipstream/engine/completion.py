"""What a request gets when it ends: its tokens, and what its KV blocks know of them.

Shape suffixes: T token positions, L MoE layers, K experts, N sampled tokens.
"""

from __future__ import annotations

import numpy as np

from slipstream.engine.kv import KvCache
from slipstream.engine.sequence import Sequence, SlotTable
from slipstream.types import Completion, FinishReason, Routing


def read_blocks(sequence: Sequence, table: SlotTable, cache: KvCache, live: int) -> tuple[Routing | None, int]:
    """Routing rows from `routing_from` on, and the age of the oldest KV block at version `live`, of a sequence that is about to go."""
    running = sequence.slot >= 0
    length = int(table.length_R[sequence.slot]) if running else len(sequence.tokens_T)
    context = int(table.context_R[sequence.slot]) if running else 0
    used = np.array(sequence.blocks[: -(-context // table.block_tokens)], np.int64)
    kv_age = live - int(cache.versions_N[used].min()) if len(used) else 0
    if not cache.num_moe_layers:
        return None, kv_age
    start = sequence.request.routing_from
    position_T = np.arange(start, max(start, length - 1))
    valid_T = position_T < context
    ids_TLK = np.zeros((len(position_T), *cache.routing.shape[1:]), cache.routing.dtype)
    known = int(valid_T.sum())
    ids_TLK[:known] = cache.rows(used, start, start + known)
    return Routing(start, ids_TLK, valid_T), kv_age


def complete(sequence: Sequence, reason: FinishReason, routing: Routing | None, kv_age: int, now: float) -> Completion:
    """Of a sequence that has left the device. `now`: in seconds of `time.perf_counter`."""
    tokens_N = sequence.tokens_T[sequence.prompt_tokens :]
    return Completion(
        id=sequence.id,
        tokens_N=tokens_N,
        logprobs_N=sequence.logprobs_N,
        versions=sequence.versions(len(tokens_N)),
        finish_reason=reason,
        routing=routing,
        cached_tokens=sequence.cached_tokens,
        cached_by_tier=sequence.cached_by_tier,
        kv_age=kv_age,
        timings=sequence.timings(now),
    )
