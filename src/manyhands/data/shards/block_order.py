"""The order in which the rows of blocks are handed out: pure, and the same for any number of workers.

The blocks of an epoch come in a random order, and K of them are open at a time, each in a slot. Each global batch takes
rows from all open blocks in turn; within a batch a block's rows are neighbours, in the order of the slots. A block that
is out leaves its slot to the next one. Within a block, rows are shuffled in pieces of about a megabyte.

So each block is read from front to back, and N workers that share out the rows of a batch share out the slots: a block
is read by one worker, unless it lies in a slot that two share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class PieceSpan(NamedTuple):
    """Neighbouring positions in one piece: rows [start, stop) of its shuffled rows."""

    block: int
    piece: int
    start: int
    stop: int


@dataclass(frozen=True)
class BlockOrder:
    """Of one epoch. A position is the number of a row in the sequence of shuffled blocks."""

    rows: Sequence[int]
    """Of each block."""
    piece_rows: Sequence[int]
    """Of each block's pieces but the last."""
    lanes: int = 1
    """Blocks that are open at a time."""
    seed: int = 0
    epoch: int = 0
    shuffled: bool = True
    """False: blocks and rows stay as they are."""
    _blocks: NDArray[np.int64] = field(init=False, repr=False, compare=False)  # the order of the blocks
    _ends: NDArray[np.int64] = field(init=False, repr=False, compare=False)  # the position behind each of them
    _stretches: list[_Stretch] = field(init=False, repr=False, compare=False)
    _firsts: NDArray[np.int64] = field(init=False, repr=False, compare=False)  # of the stretches, the row of the epoch
    _next: dict[int, int] = field(init=False, repr=False, compare=False)  # by block, the one that gets its slot

    def __post_init__(self) -> None:
        lengths = np.asarray(self.rows, np.int64)
        blocks = np.flatnonzero(lengths)
        if self.shuffled:
            blocks = self._drawn(blocks)
        ends = np.cumsum(lengths[blocks])
        stretches, following = _stretches(lengths[blocks], ends, self.lanes)
        object.__setattr__(self, "_blocks", blocks)
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "_stretches", stretches)
        object.__setattr__(self, "_firsts", np.array([one.first for one in stretches], np.int64))
        object.__setattr__(
            self, "_next", {int(blocks[place]): int(blocks[after]) for place, after in following.items()}
        )

    @property
    def total(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, start: int, stop: int) -> Positions:
        """Rows [start, stop) of the epoch as positions, slot by slot."""
        stop, parts = min(stop, self.total), []
        while start < stop:
            one = self._stretches[int(np.searchsorted(self._firsts, start, side="right")) - 1]
            positions, counts = one.turns(np.array([start - one.first]), min(stop, one.end) - start)
            parts.append((positions, np.repeat(one.slots, counts)))
            start = min(stop, one.end)
        if len(parts) == 1:
            return parts[0][0]
        if not parts:
            return np.empty(0, np.int64)
        positions, slots = (np.concatenate(found) for found in zip(*parts, strict=True))
        return positions[np.argsort(slots, kind="stable")]

    def batches(self, start: int, stop: int, size: int) -> list[Positions]:
        """Each `batch` of `size` rows, and a shorter last one, of rows [start, stop): many at once cost little more than one."""
        stop, found = min(stop, self.total), list[Positions]()
        while start < stop:
            one = self._stretches[int(np.searchsorted(self._firsts, start, side="right")) - 1]
            if whole := (min(stop, one.end) - start) // size:
                positions, _ = one.turns(start - one.first + size * np.arange(whole), size)
                found += list(positions.reshape(whole, size))
                start += whole * size
            else:
                found.append(self.batch(start, min(start + size, stop)))
                start += size
        return found

    def spans(self, positions: Positions) -> Iterator[PieceSpan]:
        """Where these positions lie, neighbours together, in their order."""
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        bounds = [0, *cuts, len(positions)] if len(positions) else []
        for first, after in pairwise(bounds):
            at, end = int(positions[first]), int(positions[after - 1]) + 1
            while at < end:
                place = int(np.searchsorted(self._ends, at, side="right"))
                block = int(self._blocks[place])
                begin = int(self._ends[place]) - self.rows[block]
                piece = (at - begin) // self.piece_rows[block]
                base = begin + piece * self.piece_rows[block]
                stop = min(end, base + self.piece_rows[block], int(self._ends[place]))
                yield PieceSpan(block, piece, at - base, stop - base)
                at = stop

    def open_blocks(self) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """(first row, end, blocks by slot) of each stretch of the epoch in which the same blocks are open."""
        for one in self._stretches:
            yield one.first, one.end, self.blocks_of(one.positions)

    def blocks_of(self, positions: Positions) -> NDArray[np.int64]:
        """The block of each position."""
        return self._blocks[np.searchsorted(self._ends, positions, side="right")]

    def after(self, span: PieceSpan) -> tuple[int, int] | None:
        """(block, piece) that follows a span's in its slot; None after the last."""
        if (span.piece + 1) * self.piece_rows[span.block] < self.rows[span.block]:
            return span.block, span.piece + 1
        return (self._next[span.block], 0) if span.block in self._next else None

    def rows_of(self, block: int, piece: int) -> int:
        return min(self.piece_rows[block], self.rows[block] - piece * self.piece_rows[block])

    def within(self, block: int, piece: int) -> NDArray[np.int64] | None:
        """The order of a piece's rows; None: as they are."""
        if not self.shuffled:
            return None
        return self._drawn(np.arange(self.rows_of(block, piece)), block, piece)

    def row_numbers(self, positions: Positions) -> Positions:
        """The numbers in the data of the rows at these positions."""
        firsts = np.cumsum([0, *self.rows], dtype=np.int64)
        found = []
        for block, piece, start, stop in self.spans(positions):
            order = self.within(block, piece)
            own = np.arange(start, stop) if order is None else order[start:stop]
            found.append(firsts[block] + piece * self.piece_rows[block] + own)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _drawn(self, values: NDArray[np.int64], *key: int) -> NDArray[np.int64]:
        """Shuffled, for each key in a way of its own. (Words of a seed end in zeros that count for nothing: (1, 2) draws what
        (1, 2, 0) does; those of a spawn key do not.)
        """
        seeds = np.random.SeedSequence((self.seed, self.epoch), spawn_key=(len(key), *key))
        return np.random.default_rng(seeds).permutation(values)


class _Stretch(NamedTuple):
    """Rows [first, end) of the epoch, in which the same blocks are open: they give a row each in turn."""

    first: int
    end: int
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Of the first row that each open block gives."""

    def turns(self, starts: NDArray[np.int64], rows: int) -> tuple[Positions, NDArray[np.int64]]:
        """(positions of so many rows of the stretch from each start on, how many each slot gives for each start): slot by slot.
        Row r is row r // K of slot r % K.
        """
        many = len(self.slots)
        firsts = (starts[:, None] + (many - 1 - np.arange(many))) // many
        counts = ((starts[:, None] + rows + (many - 1 - np.arange(many))) // many - firsts).ravel()
        begins = np.cumsum(counts) - counts
        positions = np.arange(len(starts) * rows) + np.repeat((self.positions + firsts).ravel() - begins, counts)
        return positions, counts


def _stretches(
    lengths: NDArray[np.int64], ends: NDArray[np.int64], lanes: int
) -> tuple[list[_Stretch], dict[int, int]]:
    """(the stretches of an epoch, by place in the order the place of the block that gets a block's slot).

    lengths: of the blocks in their order, none 0. ends: the position behind each.
    """
    places = np.arange(min(max(1, lanes), len(lengths)))  # by slot, the block that is open
    slots, given = np.arange(len(places)), np.zeros(len(places), np.int64)
    waiting, first = len(places), 0
    found: list[_Stretch] = []
    following: dict[int, int] = {}
    while len(slots):
        many = int((lengths[places] - given).min())
        end = first + many * len(slots)
        found.append(_Stretch(first, end, slots, ends[places] - lengths[places] + given))
        given, first = given + many, end
        for i in np.flatnonzero(given == lengths[places]):
            if waiting < len(lengths):
                following[int(places[i])] = waiting
                places, given = places.copy(), given.copy()
                places[i], given[i] = waiting, 0
                waiting += 1
        left = given < lengths[places]
        places, slots, given = places[left], slots[left], given[left]
    return found, following
