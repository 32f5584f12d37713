"""Who attends to what: every pair of tokens once, nothing more is sent than is seen, and all processes have about equally much to do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.parallel import tiles as module
from slipstream.parallel.rows import Span, spans
from slipstream.parallel.tiles import crossed, heads, needed, tiles

ROWS = [[0, 1], [0, 3], [0, 64], [0, 16, 32, 48, 64], [0, 7, 57, 63], [0, 3, 24, 46, 64], [0, 2, 6, 11], [0, 61, 64], [0, 30, 61]]


def cut(starts: list[int], cp: int, method: str = "ring") -> list[Span]:
    return spans(np.array(starts), validate(ParallelConfig, {"processes": cp, "cp": cp, "cp_method": method}))


def pairs_of(starts: list[int], window: int) -> np.ndarray:
    """[T, T] bool: which query sees which key, in one process."""
    token = np.arange(starts[-1])
    document = np.searchsorted(starts, token, "right")
    age = token[:, None] - token
    return (document[:, None] == document) & (age >= 0) & ((age < window) if window else True)


def pairs_here(parts: list[Span], rank: int, starts: np.ndarray, window: int, ring: bool) -> np.ndarray:
    """[T, T]: how often a query of this process is shown a key: by the rests of its chunks, and by the tiles of its heads."""
    counts = np.zeros((int(starts[-1]),) * 2, dtype=int)
    own = heads(parts[rank], starts)
    for head, (_, end) in zip(own, parts[rank].chunks, strict=True):
        edges = [head.end, *[int(s) for s in starts if head.end < s < end], end]
        for a, b in pairwise(edges):
            counts[a:b, a:b] += pairs_of([0, b - a], window)
    query = np.concatenate([np.arange(head.first, head.end) for head in own])
    blocks = [[range(*chunk) for part in parts for chunk in part.chunks]]
    if ring:
        others = [part for i, part in enumerate(parts) if i != rank]
        blocks = [[range(*chunk) for chunk in parts[rank].chunks], *(needed(parts[rank], part, starts, window) for part in others)]
    for block in blocks:
        key = np.concatenate([np.arange(r.start, r.stop) for r in block])
        for tile in tiles(parts[rank], block, starts, window):
            rows, columns = query[tile.queries], key[tile.keys]
            document = rows - starts[np.searchsorted(starts, rows, "right") - 1]
            assert document[0] == tile.query_place and columns[0] - rows[0] == tile.key_place - tile.query_place
            shown = pairs_of([0, int(starts[-1])], window)[np.ix_(rows, columns)]
            assert tile.whole == shown.all()
            counts[np.ix_(rows, columns)] += shown
    return counts


@pytest.mark.parametrize("queries", [3, 1024])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("starts", ROWS, ids=str)
def test_every_query_is_shown_every_key_that_it_sees_once(starts, cp, window, queries, monkeypatch):
    monkeypatch.setattr(module, "QUERIES", queries)
    parts, starts_D = cut(starts, cp), np.array(starts)
    for ring in (False, True):
        counts = sum(pairs_here(parts, rank, starts_D, window, ring) for rank in range(cp))
        np.testing.assert_array_equal(counts, pairs_of(starts, window).astype(int))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("starts", ROWS, ids=str)
def test_a_token_travels_to_a_process_only_if_a_query_there_sees_it(starts, cp, window):
    parts, starts_D, seen = cut(starts, cp), np.array(starts), pairs_of(starts, window)
    for receiver in parts:
        for sender in (part for part in parts if part is not receiver):
            sent = [token for r in needed(receiver, sender, starts_D, window) for token in r]
            expected = [token for token in sender.tokens_t if seen[receiver.tokens_t, token].any()]
            assert sent == expected


def test_documents_that_end_at_the_edges_cross_none():
    for starts, crosses in (([*range(0, 65, 8)], False), ([0, 16, 32, 48, 64], True), ([0], False)):
        assert crossed(cut(starts, 4), np.array(starts)) == crosses


def share_of_the_busiest(starts: list[int], cp: int, method: str) -> float:
    """Attention pairs of the process that has most of them, over the mean."""
    seen_T = pairs_of(starts, 0).sum(1)
    work = [seen_T[part.tokens_t].sum() for part in cut(starts, cp, method)]
    return max(work) / (sum(work) / cp)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_one_long_document_is_attended_to_by_all_processes_equally(cp):
    """By count: cut in order, the last process would have 2 - 1 / cp times the mean, and the others would wait for it."""
    assert share_of_the_busiest([0, 4000], cp, "ring") == pytest.approx(1, abs=2e-3)
    assert share_of_the_busiest([0, 4000], cp, "ulysses") == pytest.approx(2 - 1 / cp, abs=2e-3)


@pytest.mark.parametrize("documents", [2, 4, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_packed_documents_are_more_even_than_in_order(seed, documents):
    """The mean over rows of documents of random lengths. Chunks are equal and documents are not, so it does not come down to 1."""
    rng = np.random.default_rng(seed)
    rows = [[0, *np.unique(rng.integers(1, 2000, documents - 1)).tolist(), 2000] for _ in range(40)]
    ours, in_order = (np.mean([share_of_the_busiest(row, 4, method) for row in rows]) for method in ("ring", "ulysses"))
    assert 1 <= ours < 1.4
    assert ours - 1 < 0.6 * (in_order - 1)


@pytest.mark.parametrize(
    ("lengths", "window", "mean", "most"),
    [
        ([32_768], 0, 18_432, 24_576),
        ([9_000, 5_000, 13_000, 5_768], 0, 6_528, None),
        ([32_768], 128, None, 254),
        ([2_048] * 16, 0, 0, 0),
    ],
)
def test_what_a_ring_receives_is_what_the_docs_say(lengths: list[int], window: int, mean: int | None, most: int | None):
    """docs/parallel.md, Context parallelism: tokens a process, of a row of 32,768 that four share."""
    starts_D = np.cumsum([0, *lengths])
    parts = spans(starts_D, validate(ParallelConfig, {"processes": 4, "cp": 4, "cp_method": "ring"}))
    received = [sum(len(r) for other in parts if other is not own for r in needed(own, other, starts_D, window)) for own in parts]
    assert (mean is None or np.mean(received) == pytest.approx(mean, abs=1)) and (most is None or max(received) == most)
