"""Keys of KV blocks: the same name for the same block on a device, in a tier, at a peer and in the router.

The key of a block chains over the whole prefix: key_i = H(key_{i-1}, tokens of block i), and key_{-1} comes from the request's salt, so
prefixes of different salts never meet. `extend_keys` names full blocks; the block that a prompt ends in has a name of its own (`tail_key`),
which only a handoff uses. Knows nothing of who holds a block; shape suffix: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash


def extend_keys(keys: list[bytes], tokens_T: np.ndarray, salt: int, block_tokens: int) -> None:
    """Append the keys of the full blocks of `tokens_T` that `keys` does not cover yet. 128-bit xxh3: collisions do not happen."""
    full = len(tokens_T) // block_tokens
    if len(keys) >= full:
        return
    raw = np.ascontiguousarray(tokens_T[: full * block_tokens], np.int32).tobytes()
    size = 4 * block_tokens
    previous = _previous(keys, salt)
    for i in range(len(keys), full):
        previous = xxhash.xxh3_128_digest(previous + raw[i * size : (i + 1) * size])
        keys.append(previous)


def tail_key(keys: Sequence[bytes], tokens_T: np.ndarray, salt: int, block_tokens: int) -> bytes | None:
    """Of the block behind the full ones of `tokens_T`, whose keys are `keys`, with these tokens and no more; None where they end with a
    full block. Never that of a full block: fewer bytes are hashed."""
    rest_T = tokens_T[len(keys) * block_tokens :]
    raw = np.ascontiguousarray(rest_T, np.int32).tobytes()
    return xxhash.xxh3_128_digest(_previous(keys, salt) + raw) if raw else None


def _previous(keys: Sequence[bytes], salt: int) -> bytes:
    return keys[-1] if keys else b"salt:%d" % salt
