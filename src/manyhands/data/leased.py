"""A leased reading: slices are loaded as their leases come; those that will most likely come are read ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from manyhands.data.leases import Lease, Segment, foreseen
from manyhands.data.prefetch import prefetch
from manyhands.data.source import Picks, Planned, Reading, Slice, Slices


class Leased(Protocol):
    """The slices of a segment, each when its lease is here."""

    def load(self, lease: Lease) -> Slice: ...

    def close(self) -> None:
        """End all threads and processes; idempotent."""


def leased(source: Planned, segment: Segment, rank: int, reading: Reading, threads: bool = True) -> Leased:
    """How this source reads a segment; `threads`: whether one may read ahead."""
    picks, processes = source.picks(reading), source.in_processes()
    if not processes and not (threads and source.in_background(reading)):
        return OnDemand(source, picks, reading)
    own = source.load((picks.at(lease.index, lease.part) for lease in foreseen(segment, rank)), reading)
    others = OnDemand(source, picks, reading)
    return ReadAhead(others, own if processes else prefetch(own), lambda lease: segment.owner(lease.part) == rank)


class OnDemand:
    """Nothing is loaded before its lease is here."""

    def __init__(self, source: Planned, picks: Picks, reading: Reading) -> None:
        self._source, self._picks, self._reading = source, picks, reading

    def load(self, lease: Lease) -> Slice:
        return self._source.load_here(self._picks.at(lease.index, lease.part), self._reading)

    def close(self) -> None:
        pass


class ReadAhead:
    """Slices of this worker's own queues are loaded ahead, in the order in which they will be leased.

    Loading is not leasing: what others took meanwhile was loaded in vain and is thrown away. A worker gets others'
    slices only when its own queues are empty: from then on nothing is read ahead.
    """

    def __init__(self, others: OnDemand, ahead: Slices, is_own: Callable[[Lease], bool]) -> None:
        self._others, self._ahead, self._is_own = others, ahead, is_own

    def load(self, lease: Lease) -> Slice:
        if self._is_own(lease):
            return next(s for s in self._ahead if (s.index, s.part) == (lease.index, lease.part))
        self._ahead.close()
        return self._others.load(lease)

    def close(self) -> None:
        self._ahead.close()
