"""Packing of variable-length samples into rows: which sample goes into which row. Knows only lengths.

Used by the orchestrator (RL batches) and the trainer (SFT batches).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError

IndexArray = NDArray[np.int64]


def assign(lengths_S: Sequence[int] | NDArray[np.integer], row_tokens: int) -> list[IndexArray]:
    """Rows as arrays of sample indices, each summing to at most `row_tokens`; every sample in exactly one row.

    Best-fit-decreasing (Johnson 1973: at most 11/9 of the optimum + 4 rows) decides how many rows are needed. The samples are then
    spread over that many rows longest first, each into the emptiest row (LPT, Graham 1969), which balances the rows; where LPT does
    not fit, the best-fit rows stand. Deterministic; samples of a row and rows are in order of their smallest index.

    Raises ConfigError when a sample is longer than a row.
    """
    lengths = np.asarray(lengths_S, dtype=np.int64)
    if not len(lengths):
        return []
    if lengths.max() > row_tokens:
        raise ConfigError(
            f"sample {int(lengths.argmax())} has {int(lengths.max())} tokens and trainer.row_tokens = {row_tokens}: "
            "raise row_tokens, or lower model.seq_len"
        )
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order].tolist()
    best_fit = _best_fit(sizes, row_tokens)
    row_of_S = _spread(sizes, row_tokens, max(best_fit) + 1) or best_fit
    rows: list[list[int]] = [[] for _ in range(max(row_of_S) + 1)]
    for index, row in zip(order.tolist(), row_of_S, strict=True):
        rows[row].append(index)
    return sorted((np.sort(np.array(row, dtype=np.int64)) for row in rows if row), key=lambda row: int(row[0]))


def _best_fit(sizes: list[int], row_tokens: int) -> list[int]:
    """Row of each size (descending): the fullest open row that it fits, else a new one."""
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    result, num_rows = [], 0
    for size in sizes:
        at = bisect_left(rooms, (size, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = row_tokens, num_rows
            num_rows += 1
        insort(rooms, (room - size, row))
        result.append(row)
    return result


def _spread(sizes: list[int], row_tokens: int, num_rows: int) -> list[int] | None:
    """Row of each size (descending): the emptiest row; None when one does not fit there (then it fits nowhere)."""
    loads = [(0, row) for row in range(num_rows)]
    result = []
    for size in sizes:
        load, row = loads[0]
        if load + size > row_tokens:
            return None
        heapq.heapreplace(loads, (load + size, row))
        result.append(row)
    return result
