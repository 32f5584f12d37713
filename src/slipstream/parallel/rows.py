"""Which rows of a batch, and which tokens of a row, a process works on. Pure; every process has the whole batch on the host.

Shapes: T tokens of a row, t of them here, N loss tokens of the row, n of them predicted here, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from slipstream.parallel.mesh import Mesh
from slipstream.types import MicroBatch


def own_rows(rows: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
    """The rows of this process, one a pass. Alone: all, in order.

    All processes have equally many, since each pass is an exchange. Rows are split between documents until they can be dealt out evenly,
    which changes no gradient; where none can be split, empty rows fill up. Longest first, so that the rows of one pass, in which
    processes wait for each other, are about equally long.
    """
    if mesh.alone or not rows:
        return list(rows)
    size = mesh.config.data
    ordered = sorted(_split(rows, size), key=lambda row: -row.num_tokens)
    passes = -(-len(ordered) // size)
    own = ordered[mesh.data :: size]
    return own + [cut(ordered[0], 0, 0)] * (passes - len(own))


def _split(rows: Sequence[MicroBatch], size: int) -> list[MicroBatch]:
    """At least as many rows, a multiple of `size` if documents allow it: the longest that can be is halved again and again."""
    result = list(rows)
    while len(result) % size:
        longest = max(range(len(result)), key=lambda i: (len(result[i].doc_starts_D) > 2, result[i].num_tokens))
        row = result[longest]
        inner_D = row.doc_starts_D[1:-1]
        if not len(inner_D):
            break
        middle = int(inner_D[np.abs(inner_D - row.num_tokens / 2).argmin()])
        result[longest : longest + 1] = [cut(row, 0, middle), cut(row, middle, row.num_tokens)]
    return result


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens first ... end - 1 of a row of T tokens, which this process holds."""

    first: int
    end: int

    def own(self, at_N: np.ndarray) -> np.ndarray:
        """[N] bool: which loss tokens of the row are predicted here. The hidden state of token i predicts token i + 1, which may be the
        first token of the next process."""
        return (at_N > self.first) & (at_N <= self.end)


def spans(num_tokens: int, cp: int) -> list[Span]:
    """The parts of a row, one for each process that shares it; the last ones may be shorter, or empty."""
    size = -(-num_tokens // cp)
    edges = [min(i * size, num_tokens) for i in range(cp + 1)]
    return [Span(first, end) for first, end in pairwise(edges)]


def cut(row: MicroBatch, first: int, end: int) -> MicroBatch:
    """Tokens first ... end - 1. A document that is cut keeps its positions; its part counts as a document of the result."""
    if (first, end) == (0, row.num_tokens):
        return row
    per_token = [f.name for f in fields(row) if f.name != "doc_starts_D" and getattr(row, f.name) is not None]
    starts_D = (np.unique(np.clip(row.doc_starts_D, first, end)) - first).astype(row.doc_starts_D.dtype)
    return replace(row, doc_starts_D=starts_D, **{name: getattr(row, name)[first:end] for name in per_token})
