"""Cells of pairs of keys: ratings, counts of pairs of words. An order in which rows of tables are found in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.sparse.compile import compiled

CACHE_BYTES = 1 << 20
"""The second-level cache of a core, as most have it."""


def by_cells(rows: NDArray[Any], columns: NDArray[Any], row_bytes: int, seed: int) -> NDArray[np.int64]:
    """[n]: an order of n pairs of keys, for one worker that changes a row of each of two tables by each pair.

    Blocks of keys cut all pairs into cells, such that the rows of one fit the cache, but into no more cells than there
    are pairs. Cells come in a random order, and so do the pairs of one. row_bytes: of a key, in all tables together.
    """
    block = max(1, CACHE_BYTES // (2 * row_bytes))
    last_row, last_column = int(rows.max(initial=0)), int(columns.max(initial=0))
    while (last_row // block + 1) * (last_column // block + 1) > max(1, len(rows)):
        block *= 2
    wide = last_column // block + 1
    random = np.random.default_rng(seed)
    numbers = random.permutation(wide * (last_row // block + 1))
    order: NDArray[np.int64] = _by_cells(rows, columns, block, wide, numbers, random.integers(0, 1 << 63, len(rows)))
    return order


@compiled
def _by_cells(
    rows: NDArray[Any], columns: NDArray[Any], block: int, wide: int, numbers: NDArray[Any], draws: NDArray[Any]
) -> Any:
    """Sorted by the number of the cell, by counting; then each cell shuffled."""
    n, size = np.uint64(len(rows)), np.uint64(block)
    cells = np.empty(n, np.uint32)
    ends = np.zeros(len(numbers) + 1, np.int64)
    for i in range(n):
        cells[i] = numbers[np.uint64(rows[i]) // size * np.uint64(wide) + np.uint64(columns[i]) // size]
        ends[np.uint64(cells[i]) + np.uint64(1)] += 1
    ends = np.cumsum(ends)
    at = ends.copy()
    order = np.empty(n, np.int64)
    for i in range(n):
        order[at[cells[i]]] = i
        at[cells[i]] += 1
    for cell in range(len(numbers)):  # Fisher and Yates
        for i in range(ends[cell + 1] - 1, ends[cell], -1):
            other = ends[cell] + draws[i] % (i - ends[cell] + 1)
            order[i], order[other] = order[other], order[i]
    return order
