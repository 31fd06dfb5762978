"""data/readers/streams.py: N workers see what one sees, whatever the stream draws."""

import random
from functools import partial

import torch
from torch.utils.data import IterableDataset

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.readers.streams import Stream
from manyhands.data.sharding import slice_of
from manyhands.data.source import ShardPositions
from refusals import refused
from sharded_streams import Sharded


class Shuffled(IterableDataset):
    """Numbers in an order drawn from the global generators, with noise."""

    def __init__(self, rows=14):
        self.rows, self.epochs = rows, []

    def __iter__(self):
        for i in torch.randperm(self.rows).tolist():
            yield i + (random.random() < 0.5) * 100

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def read(data, rank=0, size=1, epoch=0, first_tick=0, **options):
    return list(Feed(open_source(data), rank=rank, size=size, **options).epoch(epoch, first_tick))


def values(parts):
    return [[] if part.batch is None else part.batch.tolist() for part in parts]


def test_workers_share_what_one_reads():
    """CASE 18: fourteen rows, four at a time: the last batch has fewer rows than workers."""
    alone = read(Shuffled(), batch_size=4, seed=2)
    assert sorted(row % 100 for row in sum(values(alone), [])) == list(range(14))
    for size in (2, 3, 4):
        ranks = [read(Shuffled(), rank, size, batch_size=4, seed=2) for rank in range(size)]
        assert [sum(parts, []) for parts in zip(*map(values, ranks), strict=True)] == values(alone), size
        assert [part.global_rows for part in ranks[0]] == [4, 4, 4, 2], size
        for rank, parts in enumerate(ranks):
            shares = [stop - start for start, stop in (slice_of(b, rank, size) for b in (4, 4, 4, 2))]
            assert [part.rows for part in parts] == [len(batch) for batch in values(parts)] == shares, (rank, size)


def test_epochs_and_seeds_differ_and_repeat():
    """CASE 19: a resumed epoch gives the same rows."""
    runs = [values(read(Shuffled(), batch_size=4, seed=seed, epoch=epoch)) for seed in range(2) for epoch in range(2)]
    assert len({str(run) for run in runs}) == 4
    assert values(read(Shuffled(), batch_size=4, seed=1, epoch=1, first_tick=2)) == runs[3][2:]
    before, data = torch.get_rng_state(), Shuffled()
    feed = Feed(open_source(data), batch_size=4)
    assert (feed.rows, feed.ticks) == (None, None)
    assert next(feed.epoch(7)).rows == 4
    assert data.epochs == [7]
    assert torch.equal(torch.get_rng_state(), before)  # the stream's draws are its own


def test_shards_are_read_by_their_own_workers_and_too_few_by_all():
    """CASE 18: shards of no row, of one, and of many, on two workers: every row once, and no shared tick count."""
    data = Sharded([range(0), range(1), range(10, 10), range(20, 33)])
    ranks = [read(data, rank, 2, batch_size=8) for rank in range(2)]
    assert values(ranks[0]) == []
    assert values(ranks[1]) == [[0, 20, 21, 22], [23, 24, 25, 26], [27, 28, 29, 30], [31, 32]]
    assert {part.global_rows for part in ranks[1]} == {None}
    feed = Feed(open_source(data), rank=1, size=2, batch_size=8)
    feed.go_on(0, ShardPositions(size=2, begun={}, read={**ranks[1][2].read, "1": -1}))
    assert values(list(feed.epoch(0, first_tick=3))) == [[31, 32]]
    data = Sharded([range(4), range(4, 8)])
    assert [values(read(data, rank, 3, batch_size=8)) for rank in range(3)] == [[[0, 1]], [[2, 3, 4]], [[5, 6, 7]]]
    assert values(read(data, batch_size=8)) == [list(range(8))]


def test_what_can_be_read_again_is_and_a_generator_says_why_it_cannot():
    for data in ({1: 0}.keys(), lambda: (row for row in [1])):
        source = open_source(data)
        for epoch in range(2):
            assert [part.batch.tolist() for part in Feed(source).epoch(epoch)] == [[1]]
    source = open_source(row for row in range(3))
    assert values(list(Feed(source).epoch(0))) == [[0, 1, 2]]
    refused("give a function that makes a new one", list, Feed(source).epoch(1))


def test_workers_whose_rows_hold_other_numbers_have_other_digests():
    def digests(rows):
        feeds = [Feed(open_source(partial(iter, rows[r])), rank=r, size=2, batch_size=2) for r in range(2)]
        return [[part.digest for part in feed.epoch(0)] for feed in feeds]

    for row in (float, str, lambda i: {"x": i}, lambda i: {"x": torch.tensor(i)}, lambda i: (torch.tensor(i), "a")):
        alike, other = digests([[row(0), row(1)]] * 2), digests([[row(0), row(1)], [row(1), row(2)]])
        assert alike[0] == alike[1], row(0)
        assert other[0] != other[1], row(0)


def test_no_rows_and_an_order_are_refused():
    refused("the stream gave no rows", read, iter([]))
    refused("a stream has no row numbers", lambda: Feed(Stream(lambda: [1]), order=lambda epoch: [0]))
