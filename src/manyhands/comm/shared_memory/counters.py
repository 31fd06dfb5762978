"""What ranks tell each other beside tensors: counters and operation headers, in a region at the start of each rank's
memory.

A region has one writer, its rank. First come counters, each on a cache line of its own, then a ring of slots with the
headers of the operations under way.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from manyhands.comm.shared_memory.memory import Arena

# counters, as indices of 8-byte words; 128 bytes apart, since processors fetch cache lines in pairs
_LINE = 16
ARRIVED = 0  # operations begun
READY = _LINE  # rounds of staged data laid out for the others
DONE = 2 * _LINE  # rounds in which this rank has moved its part
STATE = 3 * _LINE  # OPEN, CLOSED, or CLOSED + 1 + the rank because of which this one gave up
_FIRST_PAIR = 4

OPEN, CLOSED = 0, 1

OUTSTANDING = 64  # operations that a rank may have begun and not finished
_SLOTS = 2 * OUTSTANDING  # a peer is at most so many operations behind, so no header is overwritten before all read it
_SLOT = 1024
_HEADER = struct.Struct("<QQdqQ")
_BLOB = 64
INLINE = _SLOT - _BLOB  # bytes that fit beside a header


class Header(NamedTuple):
    """What a rank says when it arrives at an operation."""

    signature: int  # operation, dtype and source, as one number: equal on all ranks
    n: int  # elements
    weight: float
    offset: int  # where the tensor lies in the rank's memory; -1: outside, so that it has to be staged
    blob: int  # bytes that travel beside the tensor


class SharedCounters:
    """All ranks' regions, as one of them sees them. `words[rank][index]` is a counter."""

    def __init__(self, arena: Arena, size: int) -> None:
        self.rank, self.size = arena.rank, size
        counters = 8 * _LINE * (_FIRST_PAIR + 2 * size)
        start = arena.reserve(counters)
        assert start == 0, "the board comes first in an arena"
        self._slots = arena.reserve(_SLOTS * _SLOT)
        end = self._slots + _SLOTS * _SLOT
        self._regions = [memoryview(memory)[:end] for memory in arena.maps]
        self.words = [region[:counters].cast("Q") for region in self._regions]
        self._own = self.words[self.rank]

    def sent(self, target: int) -> int:
        """Index of the counter of chunks that a rank laid out for `target`."""
        return _LINE * (_FIRST_PAIR + target)

    def taken(self, source: int) -> int:
        """Index of the counter of chunks that a rank took from `source`."""
        return _LINE * (_FIRST_PAIR + self.size + source)

    def raise_to(self, index: int, value: int) -> None:
        """Set one of this rank's counters. What it stands for must be written, and `fence`d, before."""
        self._own[index] = value

    def write(self, sequence: int, header: Header, blob: bytes) -> None:
        """Lay out the header of operation `sequence`, and the blob if it fits; ARRIVED makes it known."""
        region, place = self._regions[self.rank], self._place(sequence)
        _HEADER.pack_into(region, place, *header)
        if blob and len(blob) <= INLINE:
            region[place + _BLOB : place + _BLOB + len(blob)] = blob

    def read(self, rank: int, sequence: int) -> Header:
        """The header of a rank that has arrived at operation `sequence`."""
        return Header(*_HEADER.unpack_from(self._regions[rank], self._place(sequence)))

    def inline(self, rank: int, sequence: int, length: int) -> bytes:
        """The blob beside that header, where its length is at most INLINE."""
        start = self._place(sequence) + _BLOB
        return bytes(self._regions[rank][start : start + length])

    def give_up(self, because_of: int) -> None:
        """Tell all ranks that this one will not go on, because of a rank (its own, too)."""
        self._own[STATE] = CLOSED + 1 + because_of

    def close(self) -> None:
        """Say that this rank leaves, unless it gave up before; then let go of the memory. Idempotent."""
        if not self.words:
            return
        if self._own[STATE] == OPEN:
            self._own[STATE] = CLOSED
        for view in [*self.words, *self._regions]:
            view.release()
        self.words, self._regions = [], []

    def _place(self, sequence: int) -> int:
        return self._slots + sequence % _SLOTS * _SLOT
