"""Which requests no engine takes, in the same words for all. One request must not be able to fail a step: the step is everybody's."""

from __future__ import annotations

from slipstream.errors import RequestError
from slipstream.types import GenerateRequest

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
"""Beyond these, logits divided by the temperature leave float32. 0 is greedy."""


def check_request(request: GenerateRequest, seq_len: int, vocab_size: int) -> None:
    """Raises RequestError: a prompt that is no prompt of the model, or values that no distribution has or that columns of float32 and int32
    cannot hold."""
    prompt_T, s, name = request.prompt_T, request.sampling, f"request {request.id}"
    if len(prompt_T) == 0:
        raise RequestError(f"{name}: the prompt is empty; it needs at least one token")
    if len(prompt_T) + 1 > seq_len:
        raise RequestError(f"{name}: a prompt of {len(prompt_T)} tokens leaves no room in a context of {seq_len}; shorten it")
    lowest, highest = int(prompt_T.min()), int(prompt_T.max())
    if lowest < 0 or highest >= vocab_size:
        raise RequestError(f"{name}: token id {lowest if lowest < 0 else highest} is not in the vocabulary of {vocab_size}")
    wrong = {
        "temperature": not (s.temperature == 0 or MIN_TEMPERATURE <= s.temperature <= MAX_TEMPERATURE),
        "top_p": not 0 < s.top_p <= 1,
        "top_k": s.top_k < 0,
        "min_p": not 0 <= s.min_p <= 1,
        "max_tokens": s.max_tokens < 1,
        "stop": any(not text for text in s.stop),
        "stop_token_ids": any(not 0 <= i < vocab_size for i in s.stop_token_ids),
        "routing_from": not 0 <= request.routing_from < 1 << 31,
        "salt": not 0 <= request.salt < 1 << 63,
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise RequestError(f"{name}: {field} = {getattr(s if hasattr(s, field) else request, field)!r} is out of range")
