"""Who reads which rows: the order of an epoch, and each worker's slice of a global batch. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVarTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import BadInput

Indices = NDArray[np.int64]
Arguments = TypeVarTuple("Arguments")

_held: WeakValueDictionary[Hashable, Indices] = WeakValueDictionary()


def epoch_order(rows: int, seed: int, epoch: int) -> Indices:
    """The order in which manyhands hands out the rows of an epoch: a permutation [rows] of range(rows), int64.

    It depends on its three arguments alone (and on numpy: `default_rng((seed, epoch)).permutation`), so that a plain
    loop reproduces a run:

        order = torch.from_numpy(mh.epoch_order(len(x), seed, epoch))
        for i in range(0, len(x), batch_size):
            batch = x[order[i : i + batch_size]]

    Raises BadInput for a negative argument.
    """
    if min(rows, seed, epoch) < 0:
        raise BadInput(f"rows, seed and epoch must be 0 or more, not rows={rows}, seed={seed}, epoch={epoch}")
    return np.random.default_rng((seed, epoch)).permutation(rows).astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True)
class FixedPartition:
    """The order of an epoch in which slice p of each global batch takes its rows from part p of the data alone.

    The parts are blocks of neighbouring rows, of `parts` workers, the same in every epoch, and differ in length by at
    most one row for each global batch. Called with an epoch, it gives the row numbers [rows], int64. Each epoch has
    each row once, in batches as long as without a partition; within a part the order is drawn anew if `shuffle` says
    so.
    """

    rows: int
    batch_size: int
    parts: int
    seed: int = 0
    shuffle: bool = True

    def __call__(self, epoch: int) -> Indices:
        part_of = np.concatenate(
            [self._parts_of(self.batch_size)] * (self.rows // self.batch_size)
            + [self._parts_of(self.rows % self.batch_size)]
        )
        order, first = np.empty(self.rows, np.int64), 0
        for part in range(self.parts):
            places = np.flatnonzero(part_of == part)
            own = np.arange(first, first + len(places))
            order[places] = np.random.default_rng((self.seed, epoch, part)).permutation(own) if self.shuffle else own
            first += len(places)
        return order

    def _parts_of(self, rows: int) -> Indices:
        """[rows] the part of each row of a batch of so many."""
        ends = [slice_of(rows, part, self.parts)[1] for part in range(self.parts)]
        return np.searchsorted(ends, np.arange(rows), side="right")


def shared(make: Callable[[*Arguments], Indices], *arguments: *Arguments) -> Indices:
    """make(*arguments), one array for all workers of a process while any of them holds it; not to be written to.

    The arguments must have a hash; equal ones give the same array.
    """
    key = (make, *arguments)
    indices = _held.get(key)
    if indices is None:
        indices = _held[key] = make(*arguments)
    return indices


def slice_of(b: int, rank: int, size: int) -> tuple[int, int]:
    """(start, stop) of `rank`'s share of a global batch of `b` rows: [r·b//N, (r+1)·b//N), empty for some ranks if b <
    N.

    Shares of neighbouring ranks touch, cover range(b), and differ by one row at most.
    """
    return rank * b // size, (rank + 1) * b // size


def ticks(rows: int, batch_size: int) -> int:
    """Global batches in an epoch: ceil(rows / batch_size); the last may be smaller."""
    return -(-rows // batch_size)
