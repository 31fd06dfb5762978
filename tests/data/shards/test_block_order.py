"""data/shards/block_order.py and dealing.py: every row once, block by block, the same for any number of workers."""

import random
from typing import Any

import numpy as np

from manyhands.data.sharding import slice_of, ticks
from manyhands.data.shards.block_order import BlockOrder, PieceSpan
from manyhands.data.shards.dealing import readers


def order_of(blocks: list[tuple[int, int]], **options: Any) -> BlockOrder:
    """Of blocks as (rows, rows of a piece)."""
    return BlockOrder(rows=[rows for rows, _ in blocks], piece_rows=[piece for _, piece in blocks], **options)


def batches_of(order: BlockOrder, size: int) -> list[np.ndarray[Any, Any]]:
    """The row numbers of each global batch of an epoch."""
    return [order.row_numbers(order.batch(i * size, (i + 1) * size)) for i in range(ticks(order.total, size))]


def drawn(draw: random.Random) -> tuple[list[tuple[int, int]], BlockOrder, int]:
    """(blocks, an order of them, a batch size)"""
    blocks = [(draw.choice((0, 1, draw.randint(0, 23))), draw.randint(1, 9)) for _ in range(draw.randint(1, 12))]
    options = {"lanes": draw.randint(1, 20), "seed": draw.randint(0, 9), "epoch": draw.randint(0, 2)}
    return blocks, order_of(blocks, **options, shuffled=draw.random() < 0.7), draw.randint(1, 40)


def test_batches_partition_the_rows_for_any_workers():
    """CASE 18: of each batch the same rows in the same order; a slice is found without its neighbours."""
    draw = random.Random(0)
    for _ in range(100):
        blocks, order, size = drawn(draw)
        batches, total = batches_of(order, size), sum(rows for rows, _ in blocks)
        assert order.total == total, blocks
        assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1), (blocks, order, size)
        assert sorted(row for batch in batches for row in batch.tolist()) == list(range(total)), (blocks, order, size)
        first = draw.randint(0, len(batches))
        last = draw.randint(first, len(batches) + 2)
        at_once = order.batches(first * size, last * size, size)
        one_by_one = [order.batch(i * size, (i + 1) * size) for i in range(first, min(last, len(batches)))]
        assert [batch.tolist() for batch in at_once] == [batch.tolist() for batch in one_by_one], (blocks, order, size)
        workers = draw.randint(1, 5)
        for i, whole in enumerate(batches):
            positions = order.batch(i * size, (i + 1) * size)
            slices = [positions[slice(*slice_of(len(positions), rank, workers))] for rank in range(workers)]
            rows = [row for own in slices for row in order.row_numbers(own).tolist()]
            assert rows == whole.tolist(), (blocks, order, size, workers)


def test_spans_cover_their_positions_and_row_numbers_name_their_rows():
    draw = random.Random(1)
    for _ in range(60):
        blocks, order, _ = drawn(draw)
        positions = np.array([draw.randrange(order.total) for _ in range(9 * (order.total > 0))], np.int64)
        spans = list(order.spans(positions)) if len(positions) else []
        assert sum(span.stop - span.start for span in spans) == len(positions), blocks
        firsts = np.cumsum([0, *(rows for rows, _ in blocks)])
        named = []
        for block, piece, start, stop in spans:
            rows, of_piece = blocks[block]
            length = min(of_piece, rows - piece * of_piece)
            assert 0 <= start < stop <= length, blocks
            within = order.within(block, piece)
            within = np.arange(length) if within is None else within
            assert sorted(within.tolist()) == list(range(length)), blocks
            named += [int(firsts[block] + piece * of_piece + row) for row in within[start:stop]]
        assert order.row_numbers(positions).tolist() == named, blocks


def test_after_walks_through_all_pieces():
    """Slot by slot, from the blocks that are open at first, in the order in which they come."""
    draw = random.Random(2)
    for _ in range(40):
        blocks, _, _ = drawn(draw)
        lanes = draw.randint(1, 5)
        order = order_of(blocks, lanes=lanes, seed=5)
        held = sum(rows > 0 for rows, _ in blocks)
        walked: list[list[tuple[int, int]]] = []
        for span in order.spans(order.batch(0, min(lanes, held))):
            at: tuple[int, int] | None = (span.block, span.piece)
            walked.append([])
            while at is not None:
                walked[-1].append(at)
                at = order.after(PieceSpan(*at, 0, 1))
        pieces = [(block, piece) for block, (rows, own) in enumerate(blocks) for piece in range(-(-rows // own))]
        assert sorted(one for slot in walked for one in slot) == pieces, blocks
        spans = [span for i in range(order.total) for span in order.spans(order.batch(i, i + 1))]
        in_turn = list(dict.fromkeys((span.block, span.piece) for span in spans))
        assert all([one for one in in_turn if one in slot] == slot for slot in walked), blocks


def test_two_blocks_take_turns_and_the_last_one_follows_in_the_second_slot():
    """Blocks of 4, 0, 3, 3 rows at the positions 0–3, 4–6, 7–9."""
    order = BlockOrder(rows=[4, 0, 3, 3], piece_rows=[2, 1, 3, 2], lanes=2, shuffled=False)
    for first, last, positions in [(0, 6, [0, 1, 2, 4, 5, 6]), (4, 8, [2, 3, 6, 7]), (6, 12, [3, 7, 8, 9])]:
        assert order.batch(first, last).tolist() == positions
    for rows in ([], [0, 0]):
        assert len(BlockOrder(rows=rows, piece_rows=[1] * len(rows), lanes=4).batch(0, 5)) == 0
    order = order_of([(7, 2), (0, 3), (5, 9), (1, 1)], shuffled=False)
    assert [row for batch in batches_of(order, 4) for row in batch.tolist()] == list(range(13))


def test_seeds_and_epochs_draw_orders_of_their_own_and_the_same_again():
    def rows(**key: int) -> tuple[int, ...]:
        return tuple(row for batch in batches_of(order_of([(9, 3)] * 6, lanes=3, **key), 8) for row in batch.tolist())

    assert rows(seed=1, epoch=2) == rows(seed=1, epoch=2)
    assert len({rows(seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)}) == 9
    one, same = (order_of([(9, 3)] * 6, lanes=3, seed=1) for _ in range(2))
    assert one == same
    assert one != order_of([(9, 3)] * 6, lanes=3, seed=2)
    # equally many blocks, pieces and rows: no two of their permutations are the same
    order = order_of([(60, 6)] * 6, seed=0, epoch=0)
    found = [tuple(order._blocks), *(tuple(order.within(block, piece)) for block in range(6) for piece in range(10))]
    assert len(found) - len(set(found)) < 9  # of 61 among 720, two and a half by chance
    assert found[0] != found[1]


def dealt(order: BlockOrder, batch_size: int, workers: int) -> tuple[list[int], list[set[int]]]:
    """The naive way: (rows, blocks) of each worker, batch by batch."""
    rows, blocks = [0] * workers, [set[int]() for _ in range(workers)]
    for start in range(0, order.total, batch_size):
        positions = order.batch(start, start + batch_size)
        for worker in range(workers):
            first, end = slice_of(len(positions), worker, workers)
            rows[worker] += end - first
            if end > first:
                blocks[worker] |= {span.block for span in order.spans(positions[first:end])}
    return rows, blocks


def test_readers_are_those_of_the_rows() -> None:
    draw = random.Random(3)
    for _ in range(120):
        rows = [draw.choice((0, 1, 3, 17, 50)) for _ in range(draw.randint(1, 9))] + [3]
        piece, lanes, seed = draw.randint(1, 9), draw.choice((1, 2, 3, 5, 16)), draw.randint(0, 100)
        order = BlockOrder(rows, [piece] * len(rows), lanes, seed, 0, draw.random() < 0.5)
        workers = draw.randint(1, 5)
        batch_size = workers + draw.randint(0, 36)
        found = readers(order, batch_size, workers)
        counted, blocks = dealt(order, batch_size, workers)
        assert list(found.rows) == counted, (order, batch_size, workers)
        assert list(map(set, found.blocks)) == blocks, (order, batch_size, workers)
    found = readers(BlockOrder([8] * 8, [8] * 8, lanes=4), 4, 2)  # two blocks in each of 4 slots
    assert (found.rows, found.open) == ((32, 32), (2, 2))


def test_blocks_are_open_until_they_are_out() -> None:
    """Blocks of 4 and 2 rows take turns for four rows; then the first has two left."""
    order = BlockOrder([4, 0, 2], [4, 1, 2], lanes=2, shuffled=False)
    opened = [(first, end, blocks.tolist()) for first, end, blocks in order.open_blocks()]
    assert opened == [(0, 4, [0, 2]), (4, 6, [0])]
    assert order.blocks_of(order.batch(0, 6)).tolist() == [0, 0, 0, 0, 2, 2]


def test_billions_of_rows_take_no_longer() -> None:
    found = readers(BlockOrder([1_000_000] * 4096, [25_000] * 4096, lanes=16), 256, 8)
    assert found.rows == (4096 * 1_000_000 // 8,) * 8
    assert sum(map(len, found.blocks)) == 4096
