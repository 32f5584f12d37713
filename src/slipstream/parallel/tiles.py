"""Who attends to what where documents cross the edges between processes. Pure; every process knows the whole row.

Only the *head* of a chunk, its first tokens, can belong to a document that began before it: the rest of the chunk needs no other
process. All keys that a head sees are of one document, so what it does with the keys of an earlier chunk is a rectangle.

Shapes: T tokens of the row, D documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.parallel.rows import Span

QUERIES = 1024
"""Queries of a tile at most: bounds its scores to this times the keys."""


@dataclass(frozen=True, slots=True)
class Head:
    """Tokens first ... end - 1 of the row (maybe none): the beginning of a chunk, of the document that begins at token `document`."""

    document: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries and some keys that attend to each other, all of one document."""

    queries: slice
    """Among the queries of all heads of this process, laid end to end."""
    keys: slice
    """Among the tokens that are here at that time."""
    query_place: int
    """Position in the document of the first query, and of the first key."""
    key_place: int
    whole: bool
    """Every query sees every key, as far as causality and the window decide."""


def heads(span: Span, doc_starts_D: np.ndarray) -> list[Head]:
    """Of every chunk."""
    found = []
    for first, end in span.chunks:
        document = int(doc_starts_D[np.searchsorted(doc_starts_D, first, "right") - 1])
        following = doc_starts_D[doc_starts_D > first]
        crosses = document < first < end
        found.append(Head(document, first, min(int(following[0]), end) if crosses else first))
    return found


def crossed(spans: Sequence[Span], doc_starts_D: np.ndarray) -> bool:
    """Whether a document crosses any edge: the same for all processes of a row, which exchange or do not."""
    return any(head.end > head.first for span in spans for head in heads(span, doc_starts_D))


def needed(receiver: Span, sender: Span, doc_starts_D: np.ndarray, window: int) -> list[range]:
    """Which tokens of each chunk of `sender` the heads of `receiver` see: the last ones of it. `window` 0: no bound."""
    reaching = [head for head in heads(receiver, doc_starts_D) if head.end > head.first]
    found = []
    for first, end in sender.chunks:
        begins = [max(first, _reach(head, head.first, window)) for head in reaching if head.first >= end]
        found.append(range(min([end, *begins]), end))
    return found


def tiles(span: Span, here: Sequence[range], doc_starts_D: np.ndarray, window: int) -> Iterator[Tile]:
    """Of the heads of `span` with the tokens `here` of the row, which lie end to end. A head sees those before it, and its own."""
    offset = 0
    for head in heads(span, doc_starts_D):
        for first in range(head.first, head.end, QUERIES):
            end = min(first + QUERIES, head.end)
            queries = slice(offset + first - head.first, offset + end - head.first)
            at = 0
            for keys in here:
                begin, stop = max(keys.start, _reach(head, first, window)), min(keys.stop, end)
                if begin < stop:
                    whole = stop <= first + 1 and (not window or end - 1 - begin < window)
                    places = slice(at + begin - keys.start, at + stop - keys.start)
                    yield Tile(queries, places, first - head.document, begin - head.document, whole)
                at += len(keys)
        offset += head.end - head.first


def _reach(head: Head, query: int, window: int) -> int:
    """The first token of the row that `query` sees."""
    return max(head.document, query - window + 1) if window else head.document
