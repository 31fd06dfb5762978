"""The order in which the rows of blocks are handed out: pure, and the same for any number of workers.

The blocks of an epoch come in a random order. Their rows, one block after the other, make one long sequence, which is
cut into `lanes` equal parts. Each global batch takes rows from every lane in turn, so that its rows come from as many
blocks; within a batch a lane's rows are neighbours. Within a block, rows are shuffled in pieces of a few megabytes.

So each lane is read from front to back, one block at a time, and N workers that share out the rows of a batch share out
the lanes: a worker reads K/N lanes, and a block is read by one worker unless it lies in a lane that two share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class Run(NamedTuple):
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
    seed: int = 0
    epoch: int = 0
    shuffled: bool = True
    """False: blocks and rows stay as they are."""
    _blocks: NDArray[np.int64] = field(init=False, repr=False)  # the order of the blocks
    _ends: NDArray[np.int64] = field(init=False, repr=False)  # the position behind each of them
    _starts: NDArray[np.int64] = field(init=False, repr=False)  # of the lanes

    def __post_init__(self) -> None:
        held = np.flatnonzero(np.asarray(self.rows, np.int64))
        if self.shuffled:
            held = np.random.default_rng((self.seed, self.epoch)).permutation(held)
        lanes = max(1, min(self.lanes, len(held)))
        total = int(np.sum(self.rows, dtype=np.int64))
        lengths = [(total - lane + lanes - 1) // lanes for lane in range(lanes)]
        object.__setattr__(self, "_blocks", held)
        object.__setattr__(self, "_ends", np.cumsum(np.asarray(self.rows, np.int64)[held]))
        object.__setattr__(self, "_starts", np.cumsum([0, *lengths[:-1]], dtype=np.int64))

    @property
    def total(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, start: int, stop: int) -> Positions:
        """Rows [start, stop) of the epoch as positions, lane by lane."""
        turns = np.arange(start, min(stop, self.total), dtype=np.int64)
        lanes = len(self._starts)
        if lanes == 1:
            return turns
        lane = turns % lanes
        by_lane = np.argsort(lane, kind="stable")
        return self._starts[lane[by_lane]] + turns[by_lane] // lanes

    def runs(self, positions: Positions) -> Iterator[Run]:
        """Where these positions lie, neighbours together, in their order."""
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        for first, after in zip([0, *cuts], [*cuts, len(positions)], strict=True):
            at, end = int(positions[first]), int(positions[after - 1]) + 1
            while at < end:
                place = int(np.searchsorted(self._ends, at, side="right"))
                block = int(self._blocks[place])
                begin = int(self._ends[place]) - self.rows[block]
                piece = (at - begin) // self.piece_rows[block]
                base = begin + piece * self.piece_rows[block]
                stop = min(end, base + self.piece_rows[block], int(self._ends[place]))
                yield Run(block, piece, at - base, stop - base)
                at = stop

    def after(self, run: Run) -> tuple[int, int] | None:
        """(block, piece) that follows a run's in the sequence; None after the last."""
        if (run.piece + 1) * self.piece_rows[run.block] < self.rows[run.block]:
            return run.block, run.piece + 1
        place = int(np.flatnonzero(self._blocks == run.block)[0]) + 1
        return (int(self._blocks[place]), 0) if place < len(self._blocks) else None

    def within(self, block: int, piece: int) -> NDArray[np.int64] | None:
        """The order of a piece's rows; None: as they are."""
        if not self.shuffled:
            return None
        rows = min(self.piece_rows[block], self.rows[block] - piece * self.piece_rows[block])
        return np.random.default_rng((self.seed, self.epoch, block, piece)).permutation(rows)

    def row_numbers(self, positions: Positions) -> Positions:
        """The numbers in the data of the rows at these positions."""
        firsts = np.cumsum([0, *self.rows], dtype=np.int64)
        found = []
        for block, piece, start, stop in self.runs(positions):
            order = self.within(block, piece)
            own = np.arange(start, stop) if order is None else order[start:stop]
            found.append(firsts[block] + piece * self.piece_rows[block] + own)
        return np.concatenate(found) if found else np.empty(0, np.int64)
