"""data/shards/dealing.py: the same as dealing every row of an epoch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.sharding import slice_of
from manyhands.data.shards.block_order import BlockOrder
from manyhands.data.shards.dealing import readers


def dealt(order: BlockOrder, batch_size: int, workers: int) -> tuple[list[int], list[set[int]]]:
    """The naive way: (rows, blocks) of each worker, batch by batch."""
    rows, blocks = [0] * workers, [set[int]() for _ in range(workers)]
    for start in range(0, order.total, batch_size):
        positions = order.batch(start, start + batch_size)
        for worker in range(workers):
            first, end = slice_of(len(positions), worker, workers)
            rows[worker] += end - first
            if end > first:
                blocks[worker] |= {run.block for run in order.spans(positions[first:end])}
    return rows, blocks


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.sampled_from([0, 1, 3, 17, 50]), min_size=1, max_size=9).filter(any),
    piece=st.integers(1, 9),
    lanes=st.sampled_from([1, 2, 3, 5, 16]),
    seed=st.integers(0, 100),
    shuffled=st.booleans(),
    workers=st.integers(1, 5),
    more=st.integers(0, 36),
)
def test_readers_are_those_of_the_rows(
    rows: list[int], piece: int, lanes: int, seed: int, shuffled: bool, workers: int, more: int
) -> None:
    order = BlockOrder(rows, [piece] * len(rows), lanes, seed, 0, shuffled)
    found = readers(order, workers + more, workers)
    counted, blocks = dealt(order, workers + more, workers)
    assert list(found.rows) == counted
    assert list(map(set, found.blocks)) == blocks


def test_as_many_slots_as_workers_share_no_block() -> None:
    """8 blocks of 8 rows in 4 slots: two blocks in each, and each of two workers has two slots."""
    order = BlockOrder([8] * 8, [8] * 8, lanes=4)
    found = readers(order, 4, 2)
    assert found.rows == (32, 32)
    assert [len(own) for own in found.blocks] == [4, 4]
    assert not found.blocks[0] & found.blocks[1]
    assert found.open == (2, 2)


def test_in_their_own_order_every_worker_reads_every_block() -> None:
    found = readers(BlockOrder([8] * 8, [8] * 8, shuffled=False), 4, 2)
    assert [len(own) for own in found.blocks] == [8, 8]


def test_blocks_are_open_until_they_are_out() -> None:
    """Blocks of 4 and 2 rows take turns for four rows; then the first has two left."""
    order = BlockOrder([4, 0, 2], [4, 1, 2], lanes=2, shuffled=False)
    assert [(first, end, blocks.tolist()) for first, end, blocks in order.open_blocks()] == [
        (0, 4, [0, 2]),
        (4, 6, [0]),
    ]
    assert order.blocks_of(order.batch(0, 6)).tolist() == [0, 0, 0, 0, 2, 2]


def test_billions_of_rows_take_no_longer() -> None:
    found = readers(BlockOrder([1_000_000] * 4096, [25_000] * 4096, lanes=16), 256, 8)
    assert found.rows == (4096 * 1_000_000 // 8,) * 8
    assert sum(map(len, found.blocks)) == 4096
