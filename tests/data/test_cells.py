"""The order by cells: all pairs, cell by cell."""

from __future__ import annotations

import numpy as np

from manyhands.data.cells import CACHE_BYTES, by_cells

ROW_BYTES = CACHE_BYTES // 64  # 32 keys a block


def test_pairs_of_a_cell_stand_together_in_random_order() -> None:
    random = np.random.default_rng(0)
    users, items = random.integers(100, size=30_000).astype(np.int32), random.integers(60, size=30_000)
    order = by_cells(users, items, ROW_BYTES, 5)
    assert np.array_equal(np.sort(order), np.arange(30_000))
    cells = (users // 32 * 2 + items // 32)[order]
    changes = np.flatnonzero(np.diff(cells)) + 1
    assert len(changes) + 1 == len(np.unique(cells)) == 8, "each cell's ratings stand together"
    assert not np.array_equal(np.unique(cells), cells[[0, *changes]]), "cells come in a random order"
    for cell in np.split(order, changes):
        assert abs(np.corrcoef(cell, np.arange(len(cell)))[0, 1]) < 0.15, "and so do the ratings of one"
    assert np.array_equal(order, by_cells(users, items, ROW_BYTES, 5))
    assert not np.array_equal(order, by_cells(users, items, ROW_BYTES, 6))


def test_there_are_no_more_cells_than_pairs() -> None:
    keys = np.array([0, 10**9, 10**9, 7], np.uint32)
    order = by_cells(keys, keys[::-1].copy(), CACHE_BYTES, 0)
    assert sorted(order) == [0, 1, 2, 3]
    assert by_cells(keys[:0], keys[:0], ROW_BYTES, 0).tolist() == []
