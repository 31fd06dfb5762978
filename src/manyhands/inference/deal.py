"""Which worker runs the model on which rows, and the batches themselves, in the data's own order.

Batches are cut at multiples of the batch size, as one process cuts them, whatever the number of workers. Where the
driver leases rows, each worker takes the next few batches when it is done with the last, so that a slow one takes fewer.
Elsewhere, and where loader processes or a stream give the rows, worker r gets slice r of every N batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from manyhands.data.batch import Collate, to_device
from manyhands.data.dataframe_rows import SharedRows
from manyhands.data.feed import Feed, prefetch
from manyhands.data.leases import Lease, Segment
from manyhands.data.open_source import open_source
from manyhands.data.sharding import ticks
from manyhands.data.source import Planned, Reading, Source, Unsized
from manyhands.errors import Preempted, Unsupported
from manyhands.recording.run import in_row_order
from manyhands.signals import PREEMPTED
from manyhands.worker import Worker

MOST_BATCHES = 16  # of one lease: a question to the driver then costs nothing beside the work
_LEASES = 8  # at least so many a worker, where there are enough batches: they end at about the same time


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A batch that this worker is to run the model on."""

    batch: Any
    rows: int
    number: int
    """Of the lease or slice that it is of, among those of all workers, in the data's order."""
    last: bool
    """Whether it is the last batch of that."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How the rows of some data go to the workers; the same on all of them."""

    data: Any
    batch_size: int
    collate: Collate | None = None
    loader_processes: int = 0
    leases: bool = True
    """Whether the driver leases rows."""
    in_order: bool = True
    """Whether the data's order has to be known."""

    def unordered(self) -> Deal:
        """The same, where the order does not matter."""
        return replace(self, in_order=False)

    def open(self) -> Source:
        """The rows, opened on each worker. Raises BadInput where they cannot be read so."""
        data = in_row_order(self.data, self.batch_size)
        source = open_source(data, collate=self.collate, loader_processes=self.loader_processes)
        if isinstance(source, SharedRows) and self.in_order:
            raise Unsupported(
                "the rows of this DataFrame lie on several hosts, where their order is not known: predict with mh.spark's Model.transform, which "
                "adds a column to the DataFrame, or give files"
            )
        return source

    def leases_of(self, source: Source) -> bool:
        """Whether its batches are leased."""
        return self.leases and isinstance(source, Planned) and not source.in_processes

    def batches(self, worker: Worker, source: Source) -> Iterator[Dealt]:
        """This worker's, in ascending numbers. Raises Preempted where the run was asked to stop."""
        if self.leases_of(source):
            assert isinstance(source, Planned)
            return self._leased(worker, source)
        return self._in_turn(worker, source)

    def _leased(self, worker: Worker, source: Planned) -> Iterator[Dealt]:
        reading = Reading(batch_size=self.batch_size, shuffle=False)
        source.epoch_rows(reading)
        picks = source.picks(reading)
        many = max(1, min(MOST_BATCHES, picks.batches // (_LEASES * worker.size)))
        segment = Segment(epoch=0, first=0, until=ticks(picks.batches, many), parts=1)
        ahead = source.in_background(reading)
        while isinstance(lease := worker.driver.lease(segment, 0), Lease):
            numbers = range(lease.index * many, min((lease.index + 1) * many, picks.batches))
            slices = source.load((picks.at(number, 0) for number in numbers), reading)
            with closing(prefetch(slices) if ahead else slices) as loaded:
                for number, one in zip(numbers, loaded, strict=True):
                    _obey(worker)
                    batch = to_device(one.batch, worker.device)
                    yield Dealt(batch=batch, rows=one.rows, number=lease.index, last=number == numbers[-1])
        _obey(worker)

    def _in_turn(self, worker: Worker, source: Source) -> Iterator[Dealt]:
        whole = self.batch_size * worker.size
        if isinstance(source, Unsized) and source.batch_size is not None:
            whole = source.batch_size  # its batches come as they come
        feed = Feed(
            source,
            rank=worker.rank,
            size=worker.size,
            batch_size=whole,
            shuffle=False,
            device=worker.device,
            keeps=self.in_order,  # a stream's shards, too, are read whole: their rows have no order else
        )
        with closing(feed), closing(feed.epoch(0)) as slices:
            for one in slices:
                _obey(worker)
                feed.keep_from(0, one.index)
                number = one.index * worker.size + worker.rank
                yield Dealt(batch=one.batch, rows=one.rows, number=number, last=True)


def _obey(worker: Worker) -> None:
    if reason := worker.driver.should_stop():
        why = "it was asked to end (SIGTERM)" if reason == PREEMPTED else reason
        raise Preempted(f"stopped because {why}: nothing was written; start it again")
