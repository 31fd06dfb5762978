"""A group's memory: a table, which is the group's alone, and the arenas of its members, which outlive it.

The table is one sparse memfd with a region for each rank. Only this rank writes there, all others read:

    counters   words of 8 bytes, each on a cache line of its own: see `synchronisation`
    headers    SLOTS slots for the operations under way: what a rank says when it arrives at one
    scratch    SCRATCH bytes: what lies outside the arenas goes through here in pieces
    messages   RING slots for each rank: what `send` has laid out for it

Every part begins on a page. No vector lies in a table, so a new group needs a new table and copies nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.comm.shared_memory.memory import PAGE, Arena, create_arena, mapped, mapped_arena, memory_file, pages

LINE = 16  # words: counters are 128 bytes apart, since processors fetch cache lines in pairs
FIRST_PAIR = 4  # lines of a rank's own counters; after them come two for each rank
OUTSTANDING = 64  # operations that a rank may have begun and not finished
SLOTS = 2 * OUTSTANDING  # a peer is at most so many operations behind, so no header is overwritten before all read it
SLOT = 1024
SCRATCH = 1 << 20  # bytes staged at a time
RING = 4  # chunks laid out and not yet taken
MAIL = 1 << 18  # bytes of a message at a time
_MAIL_SLOT = PAGE + MAIL  # a header, then the bytes on pages of their own

IN_TABLE = 1 << 62
"""Places from here on lie in the table; those below lie in a rank's arena, none of which is so large."""


class SharedMemory:
    """What an engine makes before it starts the workers."""

    @staticmethod
    def create(size: int) -> list[int]:
        """The descriptors for a `SharedMemoryGroup` of `size` workers: a table, then an arena for each rank.

        They are close-on-exec and the caller's: it closes them once the workers have theirs. Raises ManyhandsError,
        with nothing left open, where the system has no memory to lend.
        """
        fds: list[int] = []
        try:
            fds.append(create_table(size))
            for _ in range(size):
                fds.append(create_arena(size))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds


def create_table(size: int) -> int:
    """The descriptor of a table for one group of `size` ranks: for arenas that are there already. As `create_arena`'s."""
    return memory_file("manyhands-table", TableLayout(size).length)


class TableLayout:
    """Where the parts of a table for `size` ranks begin, in bytes from the table's start."""

    def __init__(self, size: int) -> None:
        self.counters = 8 * LINE * (FIRST_PAIR + 2 * size)  # bytes of them
        self.headers = pages(self.counters)  # from a region's start, as the next ones
        self._scratch = self.headers + SLOTS * SLOT
        self._messages = self._scratch + SCRATCH
        self._region = self._messages + size * RING * _MAIL_SLOT
        self.length = size * self._region

    def region(self, rank: int) -> slice:
        """Its counters and headers."""
        return slice(rank * self._region, rank * self._region + self._scratch)

    def scratch(self, rank: int) -> int:
        return rank * self._region + self._scratch

    def mail(self, rank: int, target: int, chunk: int) -> int:
        """Where `rank` lays out its chunk of this number for `target`."""
        return rank * self._region + self._messages + (target * RING + chunk % RING) * _MAIL_SLOT


class GroupMemory:
    """A group's table and all its members' arenas, as one of them sees them.

    A place is where something lies: an offset in a rank's arena, or IN_TABLE and an offset in the table. Tensors made
    by `view` keep their mapping alive: they stay valid after `close`.
    """

    def __init__(self, rank: int, arena: Arena, memory: Sequence[int]) -> None:
        """Map the table and the peers' arenas. The descriptors stay the caller's and may be closed afterwards."""
        assert arena.memory is not None, "the arena was closed"
        table, *arenas = memory
        self.layout = TableLayout(len(arenas))
        self.table = memoryview(mapped(table, self.layout.length, "a group's table", "fewer workers"))
        self._arenas = [arena.memory if peer == rank else mapped_arena(fd) for peer, fd in enumerate(arenas)]

    def view(self, rank: int, place: int, n: int, dtype: torch.dtype) -> Tensor:
        """[n] elements from this place of `rank` on."""
        if n == 0:
            return torch.empty(0, dtype=dtype)
        if place >= IN_TABLE:
            return torch.frombuffer(self.table, dtype=dtype, count=n, offset=place - IN_TABLE)
        return torch.frombuffer(self._arenas[rank], dtype=dtype, count=n, offset=place)

    def close(self) -> None:
        """Let go of the mappings, see `Arena.close`. The own arena stays as it is. Idempotent."""
        self.table, self._arenas = memoryview(b""), []
