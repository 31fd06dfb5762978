"""data/feed.py: exactly the global batches, once each, on any number of workers; and the thread that reads ahead."""

import random
import threading
import traceback
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from manyhands.data.feed import DEPTH, Feed, _bytes_of, prefetch
from manyhands.data.open_source import open_source
from manyhands.data.readers import arrays
from manyhands.data.sharding import epoch_order
from refusals import refused


def test_workers_split_each_global_batch():
    """CASE 18, CASE 27: every row once, one slice a tick for each worker, whatever the numbers."""
    draw = random.Random(0)
    for _ in range(60):
        rows, size, shuffle, first = draw.randint(1, 60), draw.randint(1, 9), draw.random() < 0.5, draw.randint(0, 3)
        batch_size = size + draw.randint(0, 20)
        case = f"{rows=} {size=} {shuffle=} {first=} {batch_size=}"
        order = (epoch_order(rows, 1, 2) if shuffle else np.arange(rows)).tolist()
        options = {"size": size, "batch_size": batch_size, "seed": 1, "shuffle": shuffle}
        feeds = [Feed(open_source(torch.arange(rows)), rank=rank, **options) for rank in range(size)]
        assert {feed.ticks for feed in feeds} == {-(-rows // batch_size)}, case
        by_tick = list(zip(*(feed.epoch(2, first) for feed in feeds), strict=True))
        assert len(by_tick) == max(0, feeds[0].ticks - first), case
        for tick, parts in enumerate(by_tick, first):
            whole = order[tick * batch_size : (tick + 1) * batch_size]
            handed = [[] if part.batch is None else part.batch.tolist() for part in parts]
            assert sum(handed, []) == whole, case
            assert max(map(len, handed)) - min(map(len, handed)) <= 1, case
            for part, own in zip(parts, handed, strict=True):
                assert (part.index, part.rows, part.global_rows) == (tick, len(own), len(whole)), case


@dataclass
class Backwards:
    """A callable that has no hash."""

    rows: int

    def __call__(self, epoch):
        return np.arange(self.rows)[::-1]


def test_an_order_of_ones_own():
    feed = Feed(open_source(torch.arange(10)), batch_size=4, order=lambda epoch: [epoch, epoch, 9, 9, 9])
    assert (feed.rows, feed.ticks) == (5, 2)
    assert [part.batch.tolist() for part in feed.epoch(3)] == [[3, 3, 9, 9], [9]]
    feed = Feed(open_source(torch.arange(3.0)), batch_size=3, order=Backwards(3))
    assert next(feed.epoch(0)).batch.tolist() == [2.0, 1.0, 0.0]


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


def test_what_cannot_be_is_refused():
    source = open_source(torch.arange(10))
    orders = [
        (lambda epoch: [0, 10], "from 0 to 9; got 0 to 10"),
        (lambda epoch: [-1], "got -1"),
        (lambda epoch: [0.5], "float64"),
        (lambda epoch: [], r"shape \[0\]"),
        (lambda epoch: [[1]], r"shape \[1, 1\]"),
        (lambda epoch: [0] * (1 + epoch), r"order\(1\) has length 2, and order\(0\) had length 1"),
    ]
    for order, words in orders:
        refused(words, lambda order: list(Feed(source, order=order).epoch(1)), order)
    refused("batch_size=3 leaves some of the 4 workers", lambda: Feed(source, size=4, batch_size=3))
    refused("rank=2 of size=2", lambda: Feed(source, rank=2, size=2))
    assert Feed(source).batch_size == 64


def test_batches_go_to_the_device():
    part = next(Feed(open_source((torch.arange(4), ["a", "b", "c", "d"])), device=torch.device("meta")).epoch(0))
    assert part.batch[0].device.type == "meta"
    assert part.rows == 4


@pytest.fixture
def ahead():
    """The threads that read ahead since the test began."""
    before = set(threading.enumerate())
    return lambda: [one for one in threading.enumerate() if one.name == "manyhands-prefetch" and one not in before]


def test_a_thread_reads_large_gathers_ahead_and_no_small_ones(ahead, monkeypatch):
    monkeypatch.setattr(arrays, "BACKGROUND_BYTES", 800)
    x = torch.randn(3 * (DEPTH + 3), 100)  # the thread cannot have ended when the first slice is there
    order = epoch_order(len(x), 0, 0)
    for i, part in enumerate(Feed(open_source(x), batch_size=3).epoch(0)):
        assert i or ahead()
        assert torch.equal(part.batch, x[order[3 * i : 3 * i + 3]])
    assert i == DEPTH + 2
    assert not ahead()
    parts = Feed(open_source(torch.arange(100)), batch_size=5).epoch(0)
    next(parts)
    assert not ahead()
    parts.close()


def items(n, record, fail_at=None):
    try:
        for i in range(n):
            if i == fail_at:
                raise KeyError(f"row {i}")
            record.append((i, threading.current_thread().name))
            yield i
    finally:
        record.append("closed")


def test_the_same_items_in_order_from_another_thread_that_starts_with_the_first(ahead):
    record = []
    prefetch(items(3, record)).close()
    assert record == []
    assert list(prefetch(items(20, record))) == list(range(20))
    assert {entry[1] for entry in record[:-1]} == {"manyhands-prefetch"}
    assert record[-1] == "closed"
    assert not ahead()


@pytest.mark.parametrize(("most", "waiting"), [(0, DEPTH), (10, DEPTH), (95, 10), (100, 10)])
def test_no_more_than_the_depth_or_the_bytes_are_read_ahead(most, waiting):
    """Of items of 10 bytes each."""
    reached, record = threading.Event(), []

    def counted():
        for i in range(100):
            record.append(i)
            if i == waiting + 1:
                reached.set()
            yield i

    reading = prefetch(counted(), most=most, size=lambda item: 10)
    assert next(reading) == 0
    assert reached.wait(20)  # one taken, these waiting, one in the thread's hand
    reading.close()
    assert record == list(range(waiting + 2))


def test_an_error_comes_where_its_item_would_have_with_its_own_traceback(ahead):
    reading = prefetch(items(9, [], fail_at=3))
    assert [next(reading) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="row 3") as caught:
        next(reading)
    assert "items" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not ahead()


def test_closing_or_dropping_it_early_ends_the_thread_and_closes_the_items(ahead):
    for taken in (1, 2, 5):
        for close in (True, False):
            record = []
            reading = prefetch(items(1000, record))
            for _ in range(taken):
                next(reading)
            if close:
                reading.close()
            del reading
            assert record[-1] == "closed", (taken, close)
            assert not ahead()


def test_what_batches_take_is_seen_also_where_they_hold_objects():
    """Texts, bytes of images and rows of JSON, of which thousands would be read ahead otherwise."""
    assert _bytes_of(torch.zeros(10, 4)) == 160
    for column in (
        [b"x" * 1000] * 5,
        ["x" * 1000] * 5,
        np.array(["x" * 1000] * 5, object),
        [{"text": "x" * 1000}] * 5,
        [np.zeros(1000, np.uint8)] * 5,
        [["x" * 500, "y" * 500]] * 5,
    ):
        assert 5000 <= _bytes_of(column) <= 7000, column
    assert 80 <= _bytes_of(list(range(10))) <= 400
    assert _bytes_of([]) < 100
