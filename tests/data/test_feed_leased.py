"""Leased readings: the union over workers is exactly the static reading's, whoever gets what."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from manyhands.data.feed import Feed
from manyhands.data.leases import End, Leases, Segment
from manyhands.data.open_source import open_source
from manyhands.data.readers import arrays
from manyhands.data.sharding import epoch_order


def read(
    feeds: list[Feed], segment: Segment, pick: Callable[[int], int]
) -> tuple[dict[tuple[int, int], Any], list[End]]:
    """{(index, part): slice} and the ends of all workers, which take turns as `pick` says."""
    leases, got, ends = Leases(), {}, []
    readings = [feed.leased(segment, lambda rank=rank: leases.take(rank, segment)) for rank, feed in enumerate(feeds)]
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


def values(batch: Any) -> Any:
    return None if batch is None else [b.tolist() for b in batch] if isinstance(batch, list | tuple) else batch.tolist()


def places(parts: Any) -> list[tuple[int, int]]:
    return [(part.index, part.part) for part in parts]


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i)


class Uneven:
    """A batch sampler of one's own: batches of 4, 9, 4, 6 rows."""

    batch_size = 9

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(23).tolist()
        return iter([order[:4], order[4:13], order[13:17], order[17:]])


ARRAY, ROWS = torch.arange(23), Numbers()
SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": (ARRAY, {"batch_size": 6, "seed": 3}),
    "in order": (ARRAY, {"batch_size": 6, "shuffle": False}),
    "own order": (ARRAY, {"batch_size": 6, "order": lambda epoch: [epoch, *range(22, 0, -1)]}),
    "dataset": (ROWS, {"batch_size": 6}),
    "loader": (DataLoader(ROWS, batch_size=6, shuffle=True), {}),
    "dropping loader": (DataLoader(ROWS, batch_size=6, shuffle=True, drop_last=True), {}),
    "tensor loader": (DataLoader(TensorDataset(ARRAY), batch_size=6, shuffle=True), {}),
    "own batches": (DataLoader(ROWS, batch_sampler=Uneven()), {}),
    "plain batch sampler": (DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(range(23)), 6, False)), {}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_union_is_the_static_readings(source: str) -> None:
    """CASE 18: order, epoch, drop_last and batch sampler are the same; each slice once, in any interleaving."""
    opened, options = SOURCES[source]
    draw = random.Random(0)
    for size in range(1, 5):
        for epoch in range(2):
            static = {
                place: part
                for f in feeds(opened, size, **options)
                for part in f.epoch(epoch)
                for place in places([part])
            }
            all_feeds = feeds(opened, size, **options)
            got, ends = read(all_feeds, of_all(all_feeds[0], epoch), draw.randrange)
            assert got.keys() == static.keys(), (size, epoch)
            for key, part in got.items():
                assert (part.rows, part.global_rows) == (static[key].rows, static[key].global_rows), (size, epoch)
                assert values(part.batch) == values(static[key].batch), (size, epoch)
            assert [end.reason for end in ends] == [""] * size


def test_an_interrupted_epoch_goes_on_with_another_number_of_workers() -> None:
    """CASE 18: the slices stay what they were at the epoch's beginning."""
    first = feeds(ARRAY, 3, batch_size=6)
    segment = of_all(first[0])
    leases, got = Leases(), []
    readings = [feed.leased(segment, lambda rank=rank: leases.take(rank, segment)) for rank, feed in enumerate(first)]
    for rank in (2, 0, 0, 2, 2):
        got += values(next(readings[rank]).batch)
    leases.stop("preempted")
    ends = []
    for reading in readings:
        with pytest.raises(StopIteration) as end:
            next(reading)
        ends.append(end.value.value)
    resumed = Segment(epoch=0, first=0, until=4, parts=3, size=2, left=ends[0].left)
    rest, _ = read(feeds(ARRAY, 2, batch_size=6), resumed, lambda n: n - 1)
    got += [row for part in rest.values() if part.batch is not None for row in part.batch.tolist()]
    assert sorted(got) == list(range(23))
    # more workers than slices
    three = feeds(np.arange(8), 3, batch_size=4)
    got, _ = read(three, Segment(epoch=0, first=0, until=2, parts=2, size=3), lambda n: n - 1)
    assert sorted(got) == [(i, p) for i in range(2) for p in range(2)]
    assert sorted(row for part in got.values() for row in part.batch.tolist()) == list(range(8))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Rows that a thread gathers."""
    monkeypatch.setattr(arrays, "BACKGROUND_BYTES", 10)
    return torch.arange(24.0)[:, None].repeat(1, 10)


@pytest.fixture
def ahead() -> Callable[[], bool]:
    """Whether a thread reads ahead that the test has started."""
    before = set(threading.enumerate())
    return lambda: any(one.name == "manyhands-prefetch" for one in set(threading.enumerate()) - before)


def test_a_lease_is_taken_only_when_its_slice_is_asked_for(large: torch.Tensor, ahead: Callable[[], bool]) -> None:
    """What nobody has begun stays free for others, also where this worker reads ahead."""
    asked, leases = [], Leases()
    feed = Feed(open_source(large), batch_size=6)
    segment = of_all(feed)
    reading = feed.leased(segment, lambda: asked.append(1) or leases.take(0, segment))
    assert next(reading).index == 0
    assert ahead()
    assert len(asked) == 1
    reading.close()
    assert not ahead()


def test_what_was_read_ahead_and_taken_by_others_is_thrown_away(large: torch.Tensor) -> None:
    static = {(p.index, p.part): p.batch for feed in feeds(large, 2, batch_size=12) for p in feed.epoch(0)}
    both = feeds(large, 2, batch_size=12)
    got, _ = read(both, of_all(both[0]), lambda n: n - 1)
    assert got.keys() == static.keys()
    assert all(torch.equal(got[key].batch, static[key]) for key in static)


def test_with_two_queues_of_its_own_a_worker_passes_over_what_was_taken_from_both(large: torch.Tensor) -> None:
    """And from its first slice of another's on, it reads nothing ahead any more."""
    x = large[:16]
    segment, leases = Segment(epoch=0, first=0, until=4, parts=2, size=1), Leases()
    reading = Feed(open_source(x), batch_size=4, size=1).leased(segment, lambda: leases.take(0, segment))
    assert places([next(reading), next(reading)]) == [(0, 0), (0, 1)]
    taken = [leases.take(7, segment) for _ in range(3)]  # owns nothing: from the backs
    assert places(taken) == [(3, 0), (3, 1), (2, 0)]
    rest = list(reading)
    assert places(rest) == [(1, 0), (1, 1), (2, 1)]
    assert torch.equal(rest[-1].batch, x[epoch_order(16, 0, 0)[10:12]])


def test_who_takes_from_others_reads_nothing_ahead_any_more(large: torch.Tensor, ahead: Callable[[], bool]) -> None:
    segment, leases = Segment(epoch=0, first=0, until=4, parts=3), Leases()
    feed = Feed(open_source(large), rank=0, size=3, batch_size=6)
    for _ in range(5):
        leases.take(1, segment)  # its own, and the last of worker 0's, which that reads ahead in vain
    with closing(feed.leased(segment, lambda: leases.take(0, segment))) as reading:
        assert places(islice(reading, 4)) == [(0, 0), (1, 0), (2, 0), (3, 2)]
        assert not ahead()


def test_a_stream_is_read_as_ever_and_asks_for_no_lease() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    rows = []
    for feed in feeds(Stream(), 2, batch_size=4):
        segment = Segment(epoch=0, first=1, until=1, parts=2)
        parts = list(feed.leased(segment, lambda: pytest.fail("a stream has no leases")))
        assert [part.index for part in parts] == [1, 2]
        rows += [row for part in parts for row in part.batch.tolist()]
    assert sorted(rows) == list(range(4, 10))
