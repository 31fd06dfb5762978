"""A feed: what one worker reads of a source, epoch by epoch, on its device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace

import torch

from manyhands.data.batch import to_device
from manyhands.data.leases import End, Lease, Segment, foreseen
from manyhands.data.prefetch import prefetch
from manyhands.data.source import Order, Planned, Reading, Slice, Slices, Source
from manyhands.errors import BadInput

__all__ = ["DEFAULT_BATCH_SIZE", "Feed", "Slice"]

DEFAULT_BATCH_SIZE = 64


class Feed:
    """One worker's slices of every global batch of a source.

    Over all ranks, each index of an epoch's order is handed out exactly once. Everything depends on (seed, epoch, rank,
    size, batch size) alone: the same arguments give the same bits, from any first tick on.

    Where the source draws no random numbers and reading costs more than a thread's hand-over (large gathers, files,
    Hugging Face datasets), a thread reads two batches ahead. A Dataset's own code runs in the caller's thread, because
    a thread that drew from the process's generators would make the model's dropout depend on timing; `loader_processes`
    takes it into processes, with generators of their own.
    """

    def __init__(
        self,
        source: Source,
        *,
        rank: int = 0,
        size: int = 1,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        threads: bool = True,
    ) -> None:
        """`batch_size` is global; default: the source's own, else 64. `order`: epoch -> row indices, the same on all
        ranks.
        threads: whether a thread may read ahead.

        Raises BadInput for fewer than one row a worker, a rank not in range(size), and what the source cannot do.
        """
        self.source, self.device, self._threads = source, device, threads
        self.batch_size = batch_size or source.batch_size or DEFAULT_BATCH_SIZE
        if not 0 <= rank < size:
            raise BadInput(f"rank must be in range(size), not rank={rank} of size={size}")
        if self.batch_size < size:
            raise BadInput(
                f"batch_size={self.batch_size} is fewer than one row for each of {size} workers: raise it to {size}, or take fewer workers"
            )
        self._reading = Reading(
            rank=rank, size=size, batch_size=self.batch_size, seed=seed, shuffle=shuffle, order=order
        )
        self.rows = source.epoch_rows(self._reading)
        """Handed out in an epoch by all workers together; None: unsized."""
        self.ticks = source.ticks(self._reading)
        """Global batches an epoch, the same on all workers; None: unsized."""
        self.leasable = isinstance(source, Planned)
        """Whether any worker can read any slice; else each reads its own, whatever is leased."""

    def epoch(self, epoch: int, first_tick: int = 0) -> Slices:
        """This worker's slices of an epoch from `first_tick` on.

        Sized: exactly one a tick, some empty. Unsized: until this worker's rows are out. Earlier ticks are not loaded
        (a stream reads and drops them). Closing the generator, or dropping it, ends threads and processes at once.
        """
        reading = self._of_epoch(epoch, first_tick)
        slices = self.source.slices(reading)
        if self._threads and self.source.in_background(reading):
            slices = prefetch(slices)
        with closing(slices):
            for part in slices:
                yield self._here(part)

    def leased(self, segment: Segment, take: Callable[[], Lease | End]) -> Generator[Slice, None, End]:
        """The slices that `take()` leases to this worker, one after the other, until it gives the End, which is
        returned.

        Sized: the slices are those of `epoch`, with `segment.parts` in place of the number of workers; all workers
        together get each exactly once. A lease is taken only when its slice is asked for, so that what nobody has begun
        is free for others. Where `epoch` would read ahead in a thread or in processes, this worker's own queues are
        read ahead, without being leased; what was another's is loaded here when it comes.

        Unsized: a stream has no slices to lease. Each worker reads its own, as `epoch` does from batch `segment.first`
        on, and `take` is never called.
        """
        if not isinstance(self.source, Planned):  # `leasable`, as mypy sees it
            yield from self.epoch(segment.epoch, segment.first)
            return End(reason="", left=[])
        rank, parts = self._reading.rank, segment.parts
        reading = replace(self._of_epoch(segment.epoch, segment.first), rank=rank % parts, size=parts)
        with closing(_LeasedSlices(self.source, segment, rank, reading, self._threads)) as slices:
            while isinstance(answer := take(), Lease):
                yield self._here(slices.load(answer))
        return answer

    def _of_epoch(self, epoch: int, first_tick: int) -> Reading:
        reading = replace(self._reading, epoch=epoch, first_tick=first_tick)
        if reading.order is not None and self.source.epoch_rows(reading) != self.rows:
            raise BadInput(
                f"order({epoch}) has {self.source.epoch_rows(reading)} indices, order(0) had {self.rows}: give as many in each epoch, so that "
                "the number of steps is known"
            )
        return reading

    def _here(self, part: Slice) -> Slice:
        if part.batch is None or self.device.type == "cpu":
            return part
        return replace(part, batch=to_device(part.batch, self.device))


class _LeasedSlices:
    """The slices of a segment, each when its lease is here.

    Where loader processes or a thread can read ahead, slices of this worker's own queues are loaded in the order in
    which they will be leased. Loading is not leasing: what others took meanwhile was loaded in vain and is thrown away.
    A worker gets others' slices only when its own queues are empty: from then on nothing is read ahead.
    """

    def __init__(self, source: Planned, segment: Segment, rank: int, reading: Reading, threads: bool) -> None:
        self._source, self._segment, self._rank, self._reading = source, segment, rank, reading
        self._picks = picks = source.picks(reading)
        self._ahead: Slices | None = None
        if source.in_processes or (threads and source.in_background(reading)):
            own = source.load((picks.at(lease.index, lease.part) for lease in foreseen(segment, rank)), reading)
            self._ahead = own if source.in_processes else prefetch(own)

    def load(self, lease: Lease) -> Slice:
        if self._ahead is not None and self._segment.owner(lease.part) == self._rank:
            return next(s for s in self._ahead if (s.index, s.part) == (lease.index, lease.part))
        self.close()
        return self._source.load_here(self._picks.at(lease.index, lease.part), self._reading)

    def close(self) -> None:
        """End all threads and processes; idempotent."""
        if self._ahead is not None:
            self._ahead.close()
