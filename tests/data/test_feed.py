"""data/feed.py: exactly the global batches, once each, on any number of workers."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.sharding import epoch_order, slice_of
from manyhands.errors import BadInput


def test_alone_it_is_bit_equal_to_a_plain_loop():
    """CASE 1: the data's part of it."""
    x, y = torch.randn(39, 4, dtype=torch.float64), torch.randint(5, (39,))
    feed = Feed(open_source((x, y)), batch_size=12, seed=7)
    for epoch in range(3):
        order = epoch_order(39, 7, epoch)
        for i, part in zip(range(0, 39, 12), feed.epoch(epoch), strict=True):
            assert torch.equal(part.batch[0], x[order[i : i + 12]])
            assert torch.equal(part.batch[1], y[order[i : i + 12]])
            assert part.global_rows == part.rows == len(order[i : i + 12])


@settings(deadline=None)
@given(
    rows=st.integers(1, 60),
    size=st.integers(1, 6),
    extra=st.integers(0, 20),
    shuffle=st.booleans(),
    first_tick=st.integers(0, 3),
)
def test_workers_split_each_global_batch(rows, size, extra, shuffle, first_tick):
    """CASE 18, CASE 27: every row once, one slice a tick for each worker, whatever the numbers."""
    batch_size = size + extra
    order = epoch_order(rows, 1, 2) if shuffle else np.arange(rows)
    for rank in range(size):
        feed = Feed(
            open_source(torch.arange(rows)), rank=rank, size=size, batch_size=batch_size, seed=1, shuffle=shuffle
        )
        assert feed.ticks == -(-rows // batch_size)
        parts = list(feed.epoch(2, first_tick))
        assert [part.index for part in parts] == list(range(first_tick, feed.ticks))
        for part in parts:
            whole = order[part.index * batch_size : (part.index + 1) * batch_size]
            start, stop = slice_of(len(whole), rank, size)
            assert (part.rows, part.global_rows) == (stop - start, len(whole))
            assert (part.batch is None) == (part.rows == 0)
            if part.rows:
                assert part.batch.tolist() == whole[start:stop].tolist()


def test_the_default_batch_size():
    assert Feed(open_source(torch.arange(100))).batch_size == 64


def test_an_order_of_ones_own():
    feed = Feed(open_source(torch.arange(10)), batch_size=4, order=lambda epoch: [epoch, epoch, 9, 9, 9])
    assert (feed.rows, feed.ticks) == (5, 2)
    assert [part.batch.tolist() for part in feed.epoch(3)] == [[3, 3, 9, 9], [9]]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda epoch: [0, 10], r"from 0 to 9; got 0 to 10"),
        (lambda epoch: [-1], "got -1"),
        (lambda epoch: [0.5], "float64"),
        (lambda epoch: [], r"shape \[0\]"),
        (lambda epoch: [[1]], r"shape \[1, 1\]"),
        (lambda epoch: [0] * (1 + epoch), r"order\(1\) has length 2, and order\(0\) had length 1"),
    ],
)
def test_orders_that_cannot_be(order, message):
    with pytest.raises(BadInput, match=message):
        list(Feed(open_source(torch.arange(10)), order=order).epoch(1))


def test_fewer_than_one_row_a_worker_and_ranks_out_of_range_are_refused():
    source = open_source(torch.arange(10))
    with pytest.raises(BadInput, match="batch_size=3 leaves some of the 4 workers without a row"):
        Feed(source, size=4, batch_size=3)
    with pytest.raises(BadInput, match="rank=2 of size=2"):
        Feed(source, rank=2, size=2)


def test_batches_go_to_the_device():
    part = next(Feed(open_source((torch.arange(4), ["a", "b", "c", "d"])), device=torch.device("meta")).epoch(0))
    assert part.batch[0].device.type == "meta"
    assert part.rows == 4


def test_large_gathers_are_read_ahead_and_equal():
    x = torch.randn(20, 1 << 19)  # 2 MiB a row
    order = epoch_order(20, 0, 0)
    parts = Feed(open_source(x), batch_size=5).epoch(0)
    for i, part in zip(range(0, 20, 5), parts, strict=True):
        if i == 0:
            assert "manyhands-prefetch" in {thread.name for thread in threading.enumerate()}
        assert torch.equal(part.batch, x[order[i : i + 5]])
    assert "manyhands-prefetch" not in {thread.name for thread in threading.enumerate()}


def test_small_gathers_start_no_thread():
    before = threading.active_count()
    parts = Feed(open_source(torch.arange(100)), batch_size=5).epoch(0)
    next(parts)
    assert threading.active_count() == before
    parts.close()


def test_an_order_is_computed_once_for_workers_of_one_process_that_read_the_same_epoch():
    calls = []

    def order(epoch):
        calls.append(epoch)
        return np.arange(6)[::-1]

    source = open_source(torch.arange(6.0))
    feeds = [Feed(source, rank=rank, size=2, batch_size=6, order=order) for rank in range(2)]
    first, second = (feed.epoch(0) for feed in feeds)
    batches = [next(first).batch]
    calls.clear()
    batches.append(next(second).batch)
    assert calls == []
    assert torch.cat(batches).tolist() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


@dataclass
class Backwards:
    """A callable that has no hash."""

    rows: int

    def __call__(self, epoch):
        return np.arange(self.rows)[::-1]


def test_an_order_may_be_an_object_without_a_hash():
    feed = Feed(open_source(torch.arange(3.0)), batch_size=3, order=Backwards(3))
    assert next(feed.epoch(0)).batch.tolist() == [2.0, 1.0, 0.0]
