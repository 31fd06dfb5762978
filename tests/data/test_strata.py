"""Keys in blocks and rows in cells: each row once, blocks of equally many keys and rows, an order that no worker changes."""

from typing import Any

import numpy as np

import manyhands as mh
from manyhands.data.open_source import open_source
from manyhands.data.source import Reading
from manyhands.data.strata import Cells, KeyBlocks, Strata, count_keys
from refusals import refused

ROWS = {"user": 23, "item": 11}


def rows_of(n: int = 300) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(4)
    user, item = (np.minimum(random.geometric(0.2, n) - 1, ROWS[field] - 1) for field in ROWS)
    return {"user": user, "item": item, "row": np.arange(n)}


def prepare(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: column.numpy() for name, column in batch.items()}


def blocks_of(data: dict[str, Any], count: int, seed: int = 0) -> KeyBlocks:
    return KeyBlocks.of(count_keys(open_source(data), ROWS, prepare), count, seed)


def strata_of(data: dict[str, Any], count: int, rank: int = 0, size: int = 1) -> Strata:
    return Strata(open_source(data), blocks_of(data, count), prepare, rank, size)


def test_each_key_is_in_one_block_and_blocks_are_equally_long() -> None:
    blocks, counted = blocks_of(rows_of(), 4), count_keys(open_source(rows_of()), ROWS, prepare)
    for field, count in ROWS.items():
        assert counted[field].tolist() == np.bincount(rows_of()[field], minlength=count).tolist()
        grid = blocks.keys[field]
        assert grid.shape == (4, -(-count // 4))
        assert sorted(grid[grid >= 0]) == list(range(count))
        block, place = blocks.places(field)
        assert (grid[block, place] == np.arange(count)).all()
    counts = np.sort(np.random.default_rng(0).zipf(1.5, 1000).clip(max=2000))  # about equally many rows, too
    grid = KeyBlocks.of({"a": counts, "b": counts}, 8, 0).keys["a"]
    sums = np.where(grid >= 0, counts[grid], 0).sum(1)
    assert sums.max() - sums.min() <= counts.max()


def test_the_seed_decides_among_equal_counts_alone() -> None:
    counts = np.array([5, 1, 1, 1, 1, 9])
    grids = [KeyBlocks.of({"a": counts, "b": counts}, 2, seed).keys["a"] for seed in range(6)]
    assert all(grid[0, 0] == 5 and grid[1, 0] == 0 for grid in grids)  # the most frequent ones, in this order
    assert len({grid.tobytes() for grid in grids}) > 1


def test_an_epoch_hands_out_each_row_once_in_cells_that_share_no_block() -> None:
    data = rows_of()
    blocks = blocks_of(data, 4)
    for size in (1, 2, 4):
        seen = []
        epochs = [list(strata_of(data, 4, rank, size).slices(Reading(seed=7, epoch=2))) for rank in range(size)]
        for stratum in range(4):
            parts = [slices[stratum] for slices in epochs]
            cells = [cell for part in parts for cell in part.batch.cells]
            for of in ([cell.row_block for cell in cells], [cell.column_block for cell in cells]):
                assert sorted(of) == [0, 1, 2, 3], size
            assert sum(part.rows for part in parts) == parts[0].global_rows
            for cell in cells:
                own = cell.arrays["row"]
                assert (blocks.keys["user"][cell.row_block, cell.arrays["user"]] == data["user"][own]).all()
                assert (blocks.keys["item"][cell.column_block, cell.arrays["item"]] == data["item"][own]).all()
                seen += own.tolist()
        assert sorted(seen) == list(range(300)), size


def test_the_order_within_a_cell_depends_on_seed_epoch_and_cell_alone() -> None:
    data = rows_of()

    def cells(size: int, **reading: Any) -> dict[tuple[int, int], list[int]]:
        found = {}
        for rank in range(size):
            for part in strata_of(data, 4, rank, size).slices(Reading(**reading)):
                assert isinstance(part.batch, Cells)
                found |= {(c.row_block, c.column_block): c.arrays["row"].tolist() for c in part.batch.cells}
        return found

    one = cells(1, seed=1, epoch=0)
    assert cells(2, seed=1, epoch=0) == one
    assert cells(1, seed=1, epoch=1) != one
    assert all(rows == sorted(rows) for rows in cells(1, shuffle=False).values())
    strata = strata_of(data, 4)
    whole, rest = (list(strata.slices(Reading(first_tick=tick))) for tick in (0, 3))  # a resumed epoch
    assert [part.index for part in rest] == [3]
    assert rest[0].batch.cells[0].arrays["row"].tolist() == whole[3].batch.cells[0].arrays["row"].tolist()


def test_imbalance_is_the_slowest_workers_share() -> None:
    data = {"user": np.array([0, 0, 0, 1]), "item": np.array([0, 0, 1, 1])}  # cells of 2, 1, 0 and 1 rows
    blocks = KeyBlocks.of({"user": np.array([3, 1]), "item": np.array([2, 2])}, 2, 0)
    sizes = np.zeros((2, 2))
    (row_block, _), (column_block, _) = blocks.places("user"), blocks.places("item")
    np.add.at(sizes, (row_block[data["user"]], column_block[data["item"]]), 1)
    slowest = max(sizes[0, 0], sizes[1, 1]) + max(sizes[0, 1], sizes[1, 0])
    assert Strata(open_source(data), blocks, prepare, 0, 2).imbalance == slowest * 2 / 4


def test_streams_and_orders_of_ones_own_are_refused() -> None:
    source = open_source(lambda: iter([{"user": 1, "item": 2, "row": 0}]))
    refused("stream", count_keys, source, ROWS, prepare, kind=mh.Unsupported)
    refused("order", strata_of(rows_of(), 4).epoch_rows, Reading(order=lambda epoch: [0]))


def test_pairs_of_a_cell_stand_together_in_random_order() -> None:
    """data/cells.py, with 32 keys a block."""
    from manyhands.data.cells import CACHE_BYTES, by_cells

    random, row_bytes = np.random.default_rng(0), CACHE_BYTES // 64
    users, items = random.integers(100, size=30_000).astype(np.int32), random.integers(60, size=30_000)
    order = by_cells(users, items, row_bytes, 5)
    assert np.array_equal(np.sort(order), np.arange(30_000))
    cells = (users // 32 * 2 + items // 32)[order]
    changes = np.flatnonzero(np.diff(cells)) + 1
    assert len(changes) + 1 == len(np.unique(cells)) == 8, "each cell's ratings stand together"
    assert not np.array_equal(np.unique(cells), cells[[0, *changes]]), "cells come in a random order"
    for cell in np.split(order, changes):
        assert abs(np.corrcoef(cell, np.arange(len(cell)))[0, 1]) < 0.15, "and so do the ratings of one"
    assert np.array_equal(order, by_cells(users, items, row_bytes, 5))
    assert not np.array_equal(order, by_cells(users, items, row_bytes, 6))
    keys = np.array([0, 10**9, 10**9, 7], np.uint32)  # no more cells than pairs
    assert sorted(by_cells(keys, keys[::-1].copy(), CACHE_BYTES, 0)) == [0, 1, 2, 3]
    assert by_cells(keys[:0], keys[:0], row_bytes, 0).tolist() == []
