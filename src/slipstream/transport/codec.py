"""Nouns to wire messages and back. One pair of functions a noun; the field order of `slipstream.types` is the schema."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.transport.wire import Pieces, decode, encode
from slipstream.types import Batch, Completion, GenerateRequest, MicroBatch, Routing, Sampling, Timings


def encode_request(request: GenerateRequest) -> bytes:
    """In one piece: it is small."""
    meta = {
        "id": request.id,
        "salt": request.salt,
        "routing_from": request.routing_from,
        "prefill_at": request.prefill_at,
        "sampling": request.sampling,
    }
    return b"".join(encode("generate_request", meta, {"prompt": request.prompt_T}))


def decode_request(data: bytes | memoryview) -> GenerateRequest:
    meta, arrays = decode(data, "generate_request")
    sampling = meta["sampling"]
    sampling["stop"], sampling["stop_token_ids"] = tuple(sampling["stop"]), tuple(sampling["stop_token_ids"])
    return GenerateRequest(meta["id"], arrays["prompt"], Sampling(**sampling), meta["salt"], meta["routing_from"], meta["prefill_at"])


def encode_completion(completion: Completion) -> Pieces:
    meta = {
        "id": completion.id,
        "versions": completion.versions,
        "finish_reason": completion.finish_reason,
        "cached_tokens": completion.cached_tokens,
        "cached_by_tier": completion.cached_by_tier,
        "kv_age": completion.kv_age,
        "timings": completion.timings,
    }
    arrays = {"tokens": completion.tokens_N, "logprobs": completion.logprobs_N}
    if completion.routing is not None:
        meta["routing_start"] = completion.routing.start
        arrays |= {"routing": completion.routing.ids_TLK, "routing_valid": completion.routing.valid_T}
    return encode("completion", meta, arrays, compress={"routing", "routing_valid"})


def decode_completion(data: bytes | memoryview) -> Completion:
    meta, arrays = decode(data, "completion")
    routing = None
    if "routing" in arrays:
        routing = Routing(meta["routing_start"], arrays["routing"], arrays["routing_valid"])
    return Completion(
        id=meta["id"],
        tokens_N=arrays["tokens"],
        logprobs_N=arrays["logprobs"],
        versions=tuple((v, n) for v, n in meta["versions"]),
        finish_reason=meta["finish_reason"],
        routing=routing,
        cached_tokens=meta["cached_tokens"],
        cached_by_tier=meta["cached_by_tier"],
        kv_age=meta["kv_age"],
        timings=Timings(**meta["timings"]),
    )


_ROW_FIELDS = (
    "tokens_T",
    "positions_T",
    "doc_starts_D",
    "loss_mask_T",
    "logprobs_T",
    "versions_T",
    "advantages_T",
    "temperature_T",
    "sample_T",
)
_ROUTING_FIELDS = ("routing_TLK", "routing_valid_T")


def encode_batch(batch: Batch) -> Pieces:
    meta: dict[str, Any] = {
        "step": batch.step,
        "loss_tokens": batch.loss_tokens,
        "rollout_ids": batch.rollout_ids,
        "orchestrator_state": batch.orchestrator_state,
        "num_micro_batches": len(batch.micro_batches),
    }
    arrays: dict[str, np.ndarray] = {"rewards_S": batch.rewards_S, "advantages_S": batch.advantages_S}
    for i, row in enumerate(batch.micro_batches):
        arrays |= {f"{i}/{name}": getattr(row, name) for name in _ROW_FIELDS}
        arrays |= {f"{i}/{name}": value for name in _ROUTING_FIELDS if (value := getattr(row, name)) is not None}
    return encode("batch", meta, arrays, compress={f"{i}/routing_TLK" for i in range(len(batch.micro_batches))})


def decode_batch(data: bytes | memoryview) -> Batch:
    meta, arrays = decode(data, "batch")
    rows = tuple(
        MicroBatch(**{name: arrays[f"{i}/{name}"] for name in (*_ROW_FIELDS, *_ROUTING_FIELDS) if f"{i}/{name}" in arrays})
        for i in range(meta["num_micro_batches"])
    )
    return Batch(
        step=meta["step"],
        micro_batches=rows,
        loss_tokens=meta["loss_tokens"],
        rollout_ids=tuple(meta["rollout_ids"]),
        rewards_S=arrays["rewards_S"],
        advantages_S=arrays["advantages_S"],
        orchestrator_state=meta["orchestrator_state"],
    )
