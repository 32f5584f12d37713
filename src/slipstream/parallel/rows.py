"""Which rows of a batch, and which tokens of a row, a process works on. Pure; every process has the whole batch on the host.

Shapes: T tokens of a row, t of them here, N loss tokens of the row, n of them predicted here, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from slipstream.config.parallel import ParallelConfig
from slipstream.parallel.mesh import Mesh
from slipstream.types import MicroBatch


def own_rows(rows: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
    """The rows of this process, one a pass. Alone: all, in order.

    All processes have equally many, since each pass is an exchange. Rows are split between documents until they can be dealt out evenly,
    which changes no gradient; where none can be split, empty rows fill up. Longest first, so that the rows of one pass, in which
    processes wait for each other, are about equally long. A pipeline takes `pp` rows or more, an interleaved one a multiple of `pp`.
    """
    if mesh.alone or not rows:
        return list(rows)
    data, pp = mesh.config.data, mesh.config.pp
    step = pp if mesh.config.pp_schedule == "interleaved_1f1b" else 1
    ordered = sorted(_split(rows, data * step, data * pp), key=lambda row: -row.num_tokens)
    passes = max(pp, -(-len(ordered) // (data * step)) * step)
    own = ordered[mesh.data :: data]
    return own + [cut(ordered[0], 0, 0)] * (passes - len(own))


def _split(rows: Sequence[MicroBatch], size: int, least: int) -> list[MicroBatch]:
    """At least `least` rows, a multiple of `size`, if documents allow it: the longest that can be is halved again and again."""
    result = list(rows)
    while len(result) % size or len(result) < least:
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
    """The tokens of a row that one process holds: chunks of tokens first ... end - 1, ascending, at least one, which may be empty."""

    chunks: tuple[tuple[int, int], ...]

    @property
    def tokens_t(self) -> np.ndarray:
        """Which tokens of the row, ascending."""
        return np.concatenate([np.arange(first, end) for first, end in self.chunks])

    @property
    def num_tokens(self) -> int:
        return sum(end - first for first, end in self.chunks)

    def own(self, at_N: np.ndarray) -> np.ndarray:
        """[N] bool: which loss tokens of the row are predicted here. The hidden state of token i predicts token i + 1, which may be the
        first token of another chunk, in another process."""
        return np.isin(at_N - 1, self.tokens_t)

    def before(self, at_n: np.ndarray) -> np.ndarray:
        """[n]: where the tokens that predict own loss tokens lie among those of this process."""
        return np.searchsorted(self.tokens_t, at_n - 1)


def spans(doc_starts_D: np.ndarray, config: ParallelConfig) -> list[Span]:
    """The tokens of a row for each process that shares it.

    In causal attention later tokens of a document see more. Where a process attends with its own queries, the row is cut into 2 · cp equal
    chunks, and each process takes one that sees much and one that sees little: of one document number i and number 2 cp - 1 - i
    (arXiv 2407.21783, section 3.3.2). Ulysses attends with some heads over the whole row, which is even already, and takes equal parts in
    order.
    """
    cp, num_tokens = config.cp, int(doc_starts_D[-1])
    if cp == 1:
        return [Span(((0, num_tokens),))]
    if config.cp_method == "ulysses":
        size = -(-num_tokens // cp)
        edges = [min(i * size, num_tokens) for i in range(cp + 1)]
        return [Span((chunk,)) for chunk in pairwise(edges)]
    chunks = list(pairwise(i * num_tokens // (2 * cp) for i in range(2 * cp + 1)))
    token_T = np.arange(num_tokens)
    seen_T = token_T + 1 - doc_starts_D[np.searchsorted(doc_starts_D, token_T, "right") - 1]
    order = np.argsort([seen_T[first:end].sum() for first, end in chunks], kind="stable")
    pairs = [sorted((chunks[order[i]], chunks[order[-1 - i]])) for i in range(cp)]
    return [Span(((a[0], b[1]),) if a[1] == b[0] else (a, b)) for a, b in pairs]


def take(row: MicroBatch, span: Span) -> MicroBatch:
    """The tokens of `span`, chunk after chunk. A document that is cut keeps its positions; each part counts as a document of the result."""
    if len(span.chunks) == 1:
        return cut(row, *span.chunks[0])
    parts = [cut(row, first, end) for first, end in span.chunks]
    offsets = np.cumsum([0, *(part.num_tokens for part in parts)])
    starts = [part.doc_starts_D + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
    starts_D = np.unique(np.concatenate(starts)).astype(row.doc_starts_D.dtype)
    return replace(
        row, doc_starts_D=starts_D, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _per_token(row)}
    )


def cut(row: MicroBatch, first: int, end: int) -> MicroBatch:
    """Tokens first ... end - 1. A document that is cut keeps its positions; its part counts as a document of the result."""
    if (first, end) == (0, row.num_tokens):
        return row
    starts_D = (np.unique(np.clip(row.doc_starts_D, first, end)) - first).astype(row.doc_starts_D.dtype)
    return replace(row, doc_starts_D=starts_D, **{name: getattr(row, name)[first:end] for name in _per_token(row)})


def _per_token(row: MicroBatch) -> list[str]:
    """Fields of `row` that have an entry for each token."""
    return [f.name for f in fields(row) if f.name != "doc_starts_D" and getattr(row, f.name) is not None]
