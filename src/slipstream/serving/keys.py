"""Keys of KV blocks: the same name for the same block on a device, in a tier, at a peer and in the router.

The key of a block chains over the whole prefix: key_i = H(key_{i-1}, tokens of block i), and key_{-1} comes from the request's salt, so
prefixes of different salts never meet. Only full blocks have a key. Knows nothing of who holds a block; shape suffix: T tokens.
"""

from __future__ import annotations

import numpy as np
import xxhash


def extend_keys(keys: list[bytes], tokens_T: np.ndarray, salt: int, block_tokens: int) -> None:
    """Append the keys of the full blocks of `tokens_T` that `keys` does not cover yet. 128-bit xxh3: collisions do not happen."""
    full = len(tokens_T) // block_tokens
    if len(keys) >= full:
        return
    raw = np.ascontiguousarray(tokens_T[: full * block_tokens], np.int32).tobytes()
    size = 4 * block_tokens
    previous = keys[-1] if keys else b"salt:%d" % salt
    for i in range(len(keys), full):
        previous = xxhash.xxh3_128_digest(previous + raw[i * size : (i + 1) * size])
        keys.append(previous)
