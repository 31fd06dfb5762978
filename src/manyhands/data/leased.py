"""A leased reading: slices are loaded as their leases come; those that will most likely come are read ahead."""

from __future__ import annotations

from manyhands.data.leases import Lease, Segment, foreseen
from manyhands.data.prefetch import prefetch
from manyhands.data.source import Planned, Reading, Slice, Slices


class LeasedSlices:
    """The slices of a segment, each when its lease is here.

    Where loader processes or a thread can read ahead, slices of this worker's own queues are loaded in the order in
    which they will be leased. Loading is not leasing: what others took meanwhile was loaded in vain and is thrown away.
    A worker gets others' slices only when its own queues are empty: from then on nothing is read ahead.
    """

    def __init__(self, source: Planned, segment: Segment, rank: int, reading: Reading, threads: bool = True) -> None:
        """threads: whether one may read ahead."""
        self._source, self._segment, self._rank, self._reading = source, segment, rank, reading
        self._picks = picks = source.picks(reading)
        self._ahead: Slices | None = None
        if source.in_processes() or (threads and source.in_background(reading)):
            own = source.load((picks.at(lease.index, lease.part) for lease in foreseen(segment, rank)), reading)
            self._ahead = own if source.in_processes() else prefetch(own)

    def load(self, lease: Lease) -> Slice:
        if self._ahead is not None and self._segment.owner(lease.part) == self._rank:
            return next(s for s in self._ahead if (s.index, s.part) == (lease.index, lease.part))
        self.close()
        return self._source.load_here(self._picks.at(lease.index, lease.part), self._reading)

    def close(self) -> None:
        """End all threads and processes; idempotent."""
        if self._ahead is not None:
            self._ahead.close()
