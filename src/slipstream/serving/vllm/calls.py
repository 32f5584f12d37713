"""Requests of ours as bodies of POST /inference/v1/generate, and its answers as completions. Pure.

Field names: vllm/entrypoints/scale_out/token_in_token_out/protocol.py (0.32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from slipstream.errors import EngineUnavailable, RequestError
from slipstream.serving.checks import check_request
from slipstream.types import Completion, FinishReason, GenerateRequest, Routing, Timings, Versions

NO_LOGPROB = -9999.0
"""What vLLM writes in place of a logprob that is missing or not a number."""
_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Limits(Protocol):
    @property
    def seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...


def check(request: GenerateRequest, limits: Limits) -> None:
    """Raises RequestError."""
    check_request(request, limits.seq_len, limits.vocab_size)
    seed = request.sampling.seed
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise RequestError(f"request {request.id}: seed = {seed} is out of range")


def body(request: GenerateRequest, limits: Limits) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "request_id": request.id,
        "token_ids": request.prompt_T.tolist(),
        "cache_salt": f"v{request.salt}",
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": min(sampling.max_tokens, limits.seq_len - len(request.prompt_T)),
            "stop": list(sampling.stop),
            "stop_token_ids": sorted({*limits.stop_ids, *sampling.stop_token_ids}),
            "seed": sampling.seed,
            "logprobs": 0,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
        },
    }


def tokens_of(request: GenerateRequest, choice: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and logprobs [N] of an answer, or of a piece of one. Raises EngineUnavailable when a token has no logprob."""
    tokens_N = np.array(choice["token_ids"] or [], np.int32)
    logprobs_N = np.array([entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []], np.float32)
    if len(logprobs_N) != len(tokens_N):
        raise EngineUnavailable(f"request {request.id}: {len(tokens_N)} tokens, {len(logprobs_N)} logprobs from vLLM")
    if not (np.isfinite(logprobs_N) & (logprobs_N > NO_LOGPROB)).all():
        raise EngineUnavailable(f"request {request.id}: a logprob from vLLM is missing or not a number: the weights are broken")
    return tokens_N, logprobs_N


def joined(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A streamed answer as one that is not: the last piece with a choice says how it ended, the very last one what was cached."""
    choices = [piece["choices"][0] for piece in pieces if piece["choices"]]
    last = choices[-1] if choices else {}
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or []]
    choice = {
        "token_ids": [token for choice in choices for token in choice["token_ids"] or []],
        "logprobs": {"content": content},
        "weight_versions": last.get("weight_versions"),
        "finish_reason": last.get("finish_reason"),
    }
    return {"choices": [choice], "usage": {"prompt_tokens_details": None, **(pieces[-1].get("usage") or {})} if pieces else {}}


def completion(request: GenerateRequest, answer: Mapping[str, Any], timings: Timings) -> Completion:
    """Raises EngineUnavailable when the answer lacks what it must have."""
    try:
        choice = answer["choices"][0]
        tokens_N, logprobs_N = tokens_of(request, choice)
        versions = _versions(choice["weight_versions"] or [])
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        reason = _REASONS[choice["finish_reason"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineUnavailable(f"request {request.id}: the answer of vLLM does not have the form of 0.32: {error!r}") from None
    if sum(n for _, n in versions) != len(tokens_N):
        raise EngineUnavailable(f"request {request.id}: {len(tokens_N)} tokens, versions {versions} from vLLM")
    age = _age(request.salt, cached, versions)
    return Completion(
        request.id,
        tokens_N,
        logprobs_N,
        versions,
        reason,
        cached_tokens=cached,
        cached_by_tier={"device": cached},
        kv_age=age,
        timings=timings,
    )


def nothing(request: GenerateRequest) -> Completion:
    """Of a request that was aborted before it was sent."""
    return Completion(request.id, np.zeros(0, np.int32), np.zeros(0, np.float32), (), "abort")


def with_routing(done: Completion, routing: Routing | None) -> Completion:
    return replace(done, routing=routing)


def canary_body(name: str, prompt_T: np.ndarray) -> dict[str, Any]:
    """Scores a prompt. Its salt is its own, so that no KV of other weights answers; before everything that waits."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "skip_reading_prefix_cache": True}
    return {"request_id": name, "token_ids": prompt_T.tolist(), "cache_salt": name, "priority": -1, "sampling_params": sampling}


def prompt_logprobs(prompt_T: np.ndarray, answer: Mapping[str, Any]) -> np.ndarray:
    """Of each token but the first; NaN where vLLM says nothing."""
    rows = answer.get("prompt_logprobs") or []
    found = [(row or {}).get(str(token), {}).get("logprob", np.nan) for token, row in zip(prompt_T[1:].tolist(), rows[1:], strict=False)]
    return np.array(found + [np.nan] * (len(prompt_T) - 1 - len(found)), np.float32)


def _versions(spans: list[Mapping[str, Any]]) -> Versions:
    return tuple((int(span["version"]), span["end"] - span["start"]) for span in spans if span["end"] > span["start"])


def _age(salt: int, cached: int, versions: Versions) -> int:
    """An upper bound: blocks that were found were written since the rollout began, which is what their salt says."""
    if not versions:
        return 0
    oldest = min(salt, versions[0][0]) if cached else versions[0][0]
    return max(0, versions[-1][0] - oldest)
