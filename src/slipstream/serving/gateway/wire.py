"""The turns of an ended session as one message, for clients that run outside of the gateway's process."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from slipstream.transport.codec import decode_completion, encode_completion
from slipstream.transport.wire import Pieces, decode, encode
from slipstream.types import Sampling, Turn


def encode_turns(turns: Sequence[Turn]) -> Pieces:
    """Prompts, samplings, and completions with ids, logprobs, versions and routing."""
    arrays: dict[str, np.ndarray] = {}
    for i, turn in enumerate(turns):
        arrays[f"{i}/prompt"] = turn.prompt_T
        arrays[f"{i}/completion"] = np.frombuffer(b"".join(encode_completion(turn.completion)), np.uint8)
    return encode("turns", {"sampling": [msgspec.to_builtins(turn.sampling) for turn in turns]}, arrays)


def decode_turns(data: bytes) -> tuple[Turn, ...]:
    """Raises WireError."""
    meta, arrays = decode(data, "turns")
    return tuple(
        Turn(arrays[f"{i}/prompt"], decode_completion(arrays[f"{i}/completion"].data), msgspec.convert(sampling, Sampling))
        for i, sampling in enumerate(meta["sampling"])
    )
