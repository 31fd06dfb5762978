"""data/shards/block_order.py: every row once, block by block, the same for any number of workers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.sharding import slice_of, ticks
from manyhands.data.shards.block_order import BlockOrder, PieceSpan

BLOCKS = st.lists(st.tuples(st.integers(0, 23), st.integers(1, 9)), min_size=1, max_size=12)


def order_of(blocks: list[tuple[int, int]], **options: Any) -> BlockOrder:
    """Of blocks as (rows, rows of a piece)."""
    return BlockOrder(rows=[rows for rows, _ in blocks], piece_rows=[piece for _, piece in blocks], **options)


def batches_of(order: BlockOrder, size: int) -> list[np.ndarray[Any, Any]]:
    """The row numbers of each global batch of an epoch."""
    return [order.row_numbers(order.batch(i * size, (i + 1) * size)) for i in range(ticks(order.total, size))]


@settings(deadline=None, max_examples=150)
@given(
    blocks=BLOCKS,
    lanes=st.integers(1, 20),
    size=st.integers(1, 40),
    seed=st.integers(0, 9),
    shuffled=st.booleans(),
)
def test_batches_partition_the_rows(blocks, lanes, size, seed, shuffled):
    order = order_of(blocks, lanes=lanes, seed=seed, shuffled=shuffled)
    total = sum(rows for rows, _ in blocks)
    batches = batches_of(order, size)
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(total))
    assert order.total == total


@settings(deadline=None, max_examples=100)
@given(blocks=BLOCKS, lanes=st.integers(1, 9), size=st.integers(1, 30), data=st.data())
def test_batches_at_once_are_those_one_by_one(blocks, lanes, size, data):
    order = order_of(blocks, lanes=lanes, seed=2)
    first = data.draw(st.integers(0, ticks(order.total, size)))
    last = data.draw(st.integers(first, ticks(order.total, size) + 2))
    found = order.batches(first * size, last * size, size)
    expected = [order.batch(i * size, (i + 1) * size) for i in range(first, min(last, ticks(order.total, size)))]
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


@settings(deadline=None, max_examples=80)
@given(blocks=BLOCKS, lanes=st.integers(1, 9), size=st.integers(1, 30), workers=st.integers(1, 5))
def test_workers_share_out_the_rows_of_one(blocks, lanes, size, workers):
    """CASE 18: of each batch the same rows in the same order; a slice is found without its neighbours."""
    order = order_of(blocks, lanes=lanes, seed=3, epoch=2)
    for i, whole in enumerate(batches_of(order, size)):
        positions = order.batch(i * size, (i + 1) * size)
        slices = [positions[slice(*slice_of(len(positions), rank, workers))] for rank in range(workers)]
        assert [row for own in slices for row in order.row_numbers(own).tolist()] == whole.tolist()


@settings(deadline=None, max_examples=80)
@given(blocks=BLOCKS, lanes=st.integers(1, 9), data=st.data())
def test_runs_cover_their_positions_and_row_numbers_name_their_rows(blocks, lanes, data):
    order = order_of(blocks, lanes=lanes, seed=1)
    picked = np.array(data.draw(st.lists(st.integers(0, max(0, order.total - 1)), max_size=9)), np.int64)
    positions = picked[: len(picked) * (order.total > 0)]
    spans = list(order.spans(positions)) if len(positions) else []
    assert sum(span.stop - span.start for span in spans) == len(positions)
    firsts = np.cumsum([0, *(rows for rows, _ in blocks)])
    named = []
    for block, piece, start, stop in spans:
        rows, of_piece = blocks[block]
        assert 0 <= start < stop <= min(of_piece, rows - piece * of_piece)
        within = order.within(block, piece)
        assert sorted(within.tolist()) == list(range(min(of_piece, rows - piece * of_piece)))
        named += [int(firsts[block] + piece * of_piece + row) for row in within[start:stop]]
    assert order.row_numbers(positions).tolist() == named


@settings(deadline=None, max_examples=60)
@given(blocks=BLOCKS, lanes=st.integers(1, 5))
def test_after_walks_through_all_pieces(blocks, lanes):
    """Slot by slot, from the blocks that are open at first, in the order in which they come."""
    order = order_of(blocks, lanes=lanes, seed=5)
    held = sum(rows > 0 for rows, _ in blocks)
    walked: list[list[tuple[int, int]]] = []
    for span in order.spans(order.batch(0, min(lanes, held))):
        at: tuple[int, int] | None = (span.block, span.piece)
        walked.append([])
        while at is not None:
            walked[-1].append(at)
            at = order.after(PieceSpan(*at, 0, 1))
    pieces = {(block, piece) for block, (rows, of_piece) in enumerate(blocks) for piece in range(-(-rows // of_piece))}
    assert sorted(one for slot in walked for one in slot) == sorted(pieces)
    spans = [span for i in range(order.total) for span in order.spans(order.batch(i, i + 1))]
    in_turn = list(dict.fromkeys((span.block, span.piece) for span in spans))
    assert all([one for one in in_turn if one in slot] == slot for slot in walked)


def test_a_small_case_by_hand():
    """Blocks of 4, 0, 3, 3 rows at the positions 0–3, 4–6, 7–9; two are open, and the last one follows in the second slot."""
    order = BlockOrder(rows=[4, 0, 3, 3], piece_rows=[2, 1, 3, 2], lanes=2, shuffled=False)
    assert order.batch(0, 6).tolist() == [0, 1, 2, 4, 5, 6]
    assert order.batch(4, 8).tolist() == [2, 3, 6, 7]
    assert order.batch(6, 12).tolist() == [3, 7, 8, 9]
    assert list(order.spans(order.batch(0, 6))) == [PieceSpan(0, 0, 0, 2), PieceSpan(0, 1, 0, 1), PieceSpan(2, 0, 0, 3)]
    assert list(order.spans(order.batch(4, 8))) == [PieceSpan(0, 1, 0, 2), PieceSpan(2, 0, 2, 3), PieceSpan(3, 0, 0, 1)]
    assert list(order.spans(np.arange(1, 8))) == [
        PieceSpan(0, 0, 1, 2),
        PieceSpan(0, 1, 0, 2),
        PieceSpan(2, 0, 0, 3),
        PieceSpan(3, 0, 0, 1),
    ]
    assert [
        order.after(PieceSpan(block, piece, 0, 1)) for block, piece in [(0, 0), (0, 1), (2, 0), (3, 0), (3, 1)]
    ] == [
        (0, 1),
        None,
        (3, 0),
        (3, 1),
        None,
    ]


def test_no_rows_and_no_blocks():
    for rows in ([], [0, 0]):
        order = BlockOrder(rows=rows, piece_rows=[1] * len(rows), lanes=4)
        assert order.total == 0
        assert len(order.batch(0, 5)) == 0
        assert len(order.row_numbers(order.batch(0, 5))) == 0


def test_unshuffled_it_is_the_identity():
    order = order_of([(7, 2), (0, 3), (5, 9), (1, 1)], shuffled=False)
    assert [row for batch in batches_of(order, 4) for row in batch.tolist()] == list(range(13))
    assert order.within(0, 0) is None


def test_each_batch_mixes_as_many_blocks_as_are_open():
    order = order_of([(100, 25)] * 12, lanes=4, seed=2)
    blocks = [{span.block for span in order.spans(order.batch(i * 20, (i + 1) * 20))} for i in range(60)]
    assert all(4 <= len(one) <= 8 for one in blocks)  # a slot may pass from one block to the next
    assert sum(len(one) for one in blocks) / 60 < 4.8


def test_a_worker_reads_the_blocks_of_its_slots_and_no_others():
    """24 blocks in 8 slots, 4 workers: each reads the 6 blocks of its two slots, and each block is read by one worker."""
    order = order_of([(40, 10)] * 24, lanes=8, seed=1)
    readers = defaultdict(set)
    for i in range(ticks(order.total, 32)):
        positions = order.batch(i * 32, (i + 1) * 32)
        for rank in range(4):
            for span in order.spans(positions[slice(*slice_of(len(positions), rank, 4))]):
                readers[span.block].add(rank)
    assert {len(one) for one in readers.values()} == {1}
    assert sorted(rank for one in readers.values() for rank in one) == sorted([*range(4)] * 6)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("size", [37, 64, 100])
def test_few_blocks_are_read_by_two_workers(workers, size):
    """Where slots and batches do not divide, a boundary of two workers moves between two neighbouring slots."""
    order = order_of([(200, 50)] * 64, lanes=16, seed=4)
    readers = defaultdict(set)
    for i in range(ticks(order.total, size)):
        positions = order.batch(i * size, (i + 1) * size)
        for rank in range(workers):
            for span in order.spans(positions[slice(*slice_of(len(positions), rank, workers))]):
                readers[span.block].add(rank)
    assert max(len(one) for one in readers.values()) <= 2
    shared = sum(len(one) > 1 for one in readers.values())
    assert shared <= (workers - 1) * 3 * (64 // 16 + 1)  # up to three slots at each boundary, of 4 or 5 blocks each


def test_seeds_and_epochs_draw_orders_of_their_own_and_the_same_again():
    def rows(**key: int) -> list[int]:
        return [row for batch in batches_of(order_of([(9, 3)] * 6, lanes=3, **key), 8) for row in batch.tolist()]

    assert rows(seed=1, epoch=2) == rows(seed=1, epoch=2)
    others = [rows(seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(one) for one in others}) == 9


def test_the_order_of_blocks_and_that_within_each_piece_are_drawn_for_themselves():
    """Equally many blocks, pieces and rows: no two of their permutations are the same."""
    order = order_of([(60, 6)] * 6, seed=0, epoch=0)
    drawn = [tuple(order._blocks), *(tuple(order.within(block, piece)) for block in range(6) for piece in range(10))]
    twice = len(drawn) - len(set(drawn))  # of 61 among 720, two and a half by chance
    assert twice < 9
    assert drawn[0] != drawn[1]


def test_orders_are_equal_by_what_makes_them():
    one, same = (order_of([(9, 3)] * 6, lanes=3, seed=1) for _ in range(2))
    assert one == same
    assert one != order_of([(9, 3)] * 6, lanes=3, seed=2)
