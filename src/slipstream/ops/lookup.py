"""Prompt lookup: what followed the last tokens of a sequence where they stood before (Saxena, "Prompt Lookup Decoding", 2023)?

The index of a sequence is that of LZ77 in deflate (Deutsch, RFC 1951, section 4): places where equal n-grams end form a chain, newest
first. It grows by what is new since the last call, so a step costs nothing that grows with the length. It knows no requests, no model
and not whether a guess is worth making.

Shape suffixes: R slots, T token positions, S sequences of the step, C chains.
"""

from __future__ import annotations

import numpy as np

from slipstream.ops.native import library

PLACES, LONGEST = 16, 32
"""As in kernels/lookup.c: earlier places that are compared, the newest first, and how far back each is."""
_FNV_OFFSET, _FNV_PRIME, _64_BITS = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


class LookupIndex:
    """An index a slot over the rows of a table of tokens. It keeps the arrays that it is given, and reads them at each call."""

    def __init__(self, tokens_RT: np.ndarray, known_R: np.ndarray, limit_R: np.ndarray, gram: int, native: bool = True) -> None:
        """`tokens`: of each slot `known` are known, and there may be `limit` one day. `gram`: tokens that must match at least. All int32.
        `native` False: the reference, in Python."""
        slots, length = tokens_RT.shape
        self.tokens_RT, self.known_R, self.limit_R, self.gram = tokens_RT, known_R, limit_R, gram
        self.heads_RC = np.zeros((slots, 1 << (length - 1).bit_length()), np.int32)
        self.before_RT = np.zeros((slots, length), np.int32)
        self.indexed_R = np.zeros(slots, np.int32)
        self._kernels = library() if native else None
        arrays = (tokens_RT, known_R, limit_R, self.heads_RC, self.before_RT, self.indexed_R)
        self._fixed = (*(x.ctypes.data for x in arrays), length, self.heads_RC.shape[1], gram)

    def clear(self, slot: int) -> None:
        """Another sequence has the slot now."""
        self.heads_RC[slot], self.indexed_R[slot] = 0, 0

    def guess(self, slots_S: np.ndarray, most: int) -> np.ndarray:
        """Write what should come next behind the known tokens of these slots (int64), as it followed the longest match (of several, the
        newest): `most` tokens, but not beyond the limit. Returns the length of the match [S] int32, at most LONGEST; 0: there is none.
        """
        found_S = np.zeros(len(slots_S), np.int32)
        if self._kernels is None:
            for i, slot in enumerate(slots_S.tolist()):
                found_S[i] = self._guess_one(slot, int(self.known_R[slot]), min(most, int(self.limit_R[slot] - self.known_R[slot])))
        else:
            self._kernels.lookup(*self._fixed, slots_S.ctypes.data, len(slots_S), most, found_S.ctypes.data)
        return found_S

    def _guess_one(self, slot: int, known: int, most: int) -> int:
        row_T, heads_C, before_T = self.tokens_RT[slot], self.heads_RC[slot], self.before_RT[slot]
        start = max(int(self.indexed_R[slot]), self.gram - 1)
        for place in range(start, known - 1):
            chain = self._chain_of(row_T, place)
            before_T[place], heads_C[chain] = heads_C[chain], place + 1
        self.indexed_R[slot] = max(start, known - 1)
        if known - 1 < self.gram:
            return 0
        best, source, at, tried = self.gram - 1, 0, int(heads_C[self._chain_of(row_T, known - 1)]), 0
        while at and tried < PLACES and best < LONGEST:
            differs_N = np.flatnonzero(row_T[:at][::-1][:LONGEST] != row_T[:known][::-1][: min(at, LONGEST)])
            same = int(differs_N[0]) if len(differs_N) else min(at, LONGEST)
            if same > best:
                best, source = same, at
            at, tried = int(before_T[at - 1]), tried + 1
        if best < self.gram:
            return 0
        for j in range(most):
            row_T[known + j] = row_T[source + j]
        return best

    def _chain_of(self, row_T: np.ndarray, last: int) -> int:
        code = _FNV_OFFSET
        for token in row_T[last + 1 - self.gram : last + 1].tolist():
            code = ((code ^ token) * _FNV_PRIME) & _64_BITS
        return (code ^ (code >> 32)) & (self.heads_RC.shape[1] - 1)
