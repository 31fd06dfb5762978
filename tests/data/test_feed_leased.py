"""Leased readings: the union over workers is exactly the static reading's, whoever gets what."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from manyhands.data.feed import Feed
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.data.open_source import open_source
from manyhands.data.sharding import epoch_order


def read(
    feeds: list[Feed], segment: Segment, pick: Callable[[int], int]
) -> tuple[dict[tuple[int, int], Any], list[End]]:
    """{(index, part): slice} and the ends of all workers, which take turns as `pick` says."""
    leases, got, ends = Leases(), {}, []

    def take_of(rank: int) -> Callable[[], Lease | End]:
        return lambda: leases.take(rank, segment)  # type: ignore[return-value]

    readings = [feed.leased(segment, take_of(rank)) for rank, feed in enumerate(feeds)]
    while readings:
        reading = readings[pick(len(readings))]
        try:
            part = next(reading)
        except StopIteration as end:
            ends.append(end.value)
            readings.remove(reading)
        else:
            assert (part.index, part.part) not in got
            got[part.index, part.part] = part
    return got, ends


def feeds(data: Any, size: int, **options: Any) -> list[Feed]:
    return [Feed(open_source(data), rank=rank, size=size, **options) for rank in range(size)]


def of_all(feed: Feed, epoch: int = 0) -> Segment:
    assert feed.ticks is not None
    return Segment(epoch=epoch, first=0, until=feed.ticks, parts=feed._reading.size)


class Squares(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: int = 23) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i)


def uneven(dataset: Any) -> DataLoader[Any]:
    """A batch sampler of one's own: batches of 4, 9, 4, 6 rows."""

    class Sampler:
        batch_size = 9

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(23).tolist()
            return iter([order[:4], order[4:13], order[13:17], order[17:]])

    return DataLoader(dataset, batch_sampler=Sampler())  # type: ignore[arg-type]


SOURCES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "arrays": lambda: (torch.arange(23), {"batch_size": 6, "seed": 3}),
    "in order": lambda: (torch.arange(23), {"batch_size": 6, "shuffle": False}),
    "own order": lambda: (torch.arange(23), {"batch_size": 6, "order": lambda epoch: [epoch, *range(22, 0, -1)]}),
    "dataset": lambda: (Squares(), {"batch_size": 6}),
    "loader": lambda: (DataLoader(Squares(), batch_size=6, shuffle=True), {}),
    "dropping loader": lambda: (DataLoader(Squares(), batch_size=6, shuffle=True, drop_last=True), {}),
    "tensor loader": lambda: (DataLoader(TensorDataset(torch.arange(23)), batch_size=6, shuffle=True), {}),
    "own batches": lambda: (uneven(Squares()), {}),
    "plain batch sampler": lambda: (
        DataLoader(Squares(), batch_sampler=BatchSampler(SequentialSampler(range(23)), 6, False)),
        {},
    ),
}


@pytest.mark.parametrize("source", SOURCES)
@settings(deadline=None, max_examples=15)
@given(size=st.integers(1, 4), epoch=st.integers(0, 2), data=st.data())
def test_the_union_is_the_static_readings(source: str, size: int, epoch: int, data) -> None:  # type: ignore[no-untyped-def]
    """CASE 18: order, epoch, drop_last and batch sampler are the same; each slice once, in any interleaving."""
    opened, options = SOURCES[source]()
    static = {(part.index, part.part): part for feed in feeds(opened, size, **options) for part in feed.epoch(epoch)}
    all_feeds = feeds(opened, size, **options)
    got, ends = read(all_feeds, of_all(all_feeds[0], epoch), lambda n: data.draw(st.integers(0, n - 1)))
    assert got.keys() == static.keys()
    for key, part in got.items():
        assert (part.rows, part.global_rows) == (static[key].rows, static[key].global_rows)
        assert _values(part.batch) == _values(static[key].batch)
    assert [end.reason for end in ends] == [""] * size


def _values(batch: Any) -> Any:
    return None if batch is None else [b.tolist() for b in batch] if isinstance(batch, list | tuple) else batch.tolist()


def test_an_interrupted_epoch_goes_on_with_another_number_of_workers() -> None:
    """CASE 18: the slices stay what they were at the epoch's beginning."""
    first = feeds(torch.arange(23), 3, batch_size=6)
    segment = of_all(first[0])
    leases, got = Leases(), []
    readings = [
        feed.leased(segment, lambda rank=rank: leases.take(rank, segment))  # type: ignore[misc,arg-type]
        for rank, feed in enumerate(first)
    ]
    for rank in (2, 0, 0, 2, 2):
        got += _values(next(readings[rank]).batch)
    leases.stop("preempted")
    ends = []
    for reading in readings:
        with pytest.raises(StopIteration) as end:
            next(reading)
        ends.append(end.value.value)
    resumed = feeds(torch.arange(23), 2, batch_size=6)
    rest, _ = read(resumed, Segment(epoch=0, first=0, until=4, parts=3, size=2, left=ends[0].left), lambda n: n - 1)
    got += [row for part in rest.values() if part.batch is not None for row in part.batch.tolist()]
    assert sorted(got) == list(range(23))


def test_a_lease_is_taken_only_when_its_slice_is_asked_for() -> None:
    """What nobody has begun stays free for others, also where this worker reads ahead."""
    asked = []
    leases = Leases()
    feed = Feed(open_source(torch.randn(12, 1 << 20)), batch_size=3)  # 12 MiB a batch is read ahead by a thread
    segment = of_all(feed)

    def take() -> Lease | End:
        asked.append(1)
        return leases.take(0, segment)  # type: ignore[return-value]

    reading = feed.leased(segment, take)
    assert next(reading).index == 0
    assert "manyhands-prefetch" in {thread.name for thread in threading.enumerate()}
    assert len(asked) == 1
    reading.close()
    assert "manyhands-prefetch" not in {thread.name for thread in threading.enumerate()}


def test_what_was_read_ahead_and_taken_by_others_is_thrown_away() -> None:
    x = torch.randn(12, 1 << 20)
    both = feeds(x, 2, batch_size=6, shuffle=True)
    static = {(p.index, p.part): p.batch for feed in feeds(x, 2, batch_size=6) for p in feed.epoch(0)}
    got, _ = read(both, of_all(both[0]), lambda n: n - 1)
    assert got.keys() == static.keys()
    assert all(torch.equal(got[key].batch, static[key]) for key in static)


def test_with_two_queues_of_its_own_a_worker_passes_over_what_was_taken_from_both() -> None:
    """And from its first slice of another's on, it reads nothing ahead any more."""
    x = torch.randn(16, 1 << 20)  # 8 MiB a slice of 2 rows
    segment, leases = Segment(epoch=0, first=0, until=4, parts=2, size=1), Leases()
    feed = Feed(open_source(x), batch_size=4, size=1)
    reading = feed.leased(segment, lambda: leases.take(0, segment))  # type: ignore[arg-type,return-value]
    assert [(part.index, part.part) for part in (next(reading), next(reading))] == [(0, 0), (0, 1)]
    taken = [leases.take(7, segment) for _ in range(3)]  # owns nothing: from the backs
    assert [(lease.index, lease.part) for lease in taken] == [(3, 0), (3, 1), (2, 0)]  # type: ignore[union-attr]
    rest = list(reading)
    assert [(part.index, part.part) for part in rest] == [(1, 0), (1, 1), (2, 1)]
    order = epoch_order(16, 0, 0)
    assert torch.equal(rest[-1].batch, x[order[10:12]])


def test_who_takes_from_others_reads_nothing_ahead_any_more() -> None:
    segment, leases = Segment(epoch=0, first=0, until=4, parts=3), Leases()
    feed = Feed(open_source(torch.randn(24, 1 << 20)), rank=0, size=3, batch_size=6)
    for _ in range(5):
        leases.take(1, segment)  # its own, and the last of worker 0's, which that reads ahead in vain
    with closing(feed.leased(segment, lambda: leases.take(0, segment))) as reading:  # type: ignore[arg-type,return-value]
        assert [(part.index, part.part) for part in islice(reading, 4)] == [(0, 0), (1, 0), (2, 0), (3, 2)]
        assert "manyhands-prefetch" not in {thread.name for thread in threading.enumerate()}


def test_a_stream_is_read_as_ever_and_asks_for_no_lease() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    def never() -> Lease | End:
        raise AssertionError("a stream has no leases")

    rows = []
    for feed in feeds(Stream(), 2, batch_size=4):
        reading = feed.leased(Segment(epoch=0, first=1, until=1, parts=2), never)
        parts = list(reading)
        assert [part.index for part in parts] == [1, 2]
        rows += [row for part in parts for row in part.batch.tolist()]
    assert sorted(rows) == list(range(4, 10))


def test_more_workers_than_slices_of_a_resumed_epoch() -> None:
    three = feeds(np.arange(8), 3, batch_size=4)
    got, _ = read(three, Segment(epoch=0, first=0, until=2, parts=2, size=3), lambda n: n - 1)
    assert sorted(got) == [(i, p) for i in range(2) for p in range(2)]
    assert sorted(row for part in got.values() for row in part.batch.tolist()) == list(range(8))
