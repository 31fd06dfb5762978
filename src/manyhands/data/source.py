"""The contract of a source: it reads, for one worker, that worker's slice of each global batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from manyhands.data.share import epoch_order, slice_of, ticks
from manyhands.errors import BadInput

Order = Callable[[int], Any]  # epoch -> row indices


@dataclass(frozen=True)
class Slice:
    """One worker's part of one global batch."""

    batch: Any | None
    """This worker's rows, or None where it has none."""
    rows: int
    """How many they are."""
    global_rows: int | None
    """How many all workers have together; None where nobody knows (each worker reads a shard of a stream)."""
    index: int
    """The tick within the epoch."""


Slices = Generator[Slice, None, None]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which rows of a source one worker wants in one epoch."""

    rank: int = 0
    size: int = 1
    batch_size: int = 64
    """Global."""
    seed: int = 0
    shuffle: bool = True
    order: Order | None = None
    epoch: int = 0
    first_tick: int = 0
    """Ticks before it are not read (a stream reads and drops them)."""


@dataclass(frozen=True, slots=True)
class Pick:
    """What one worker is to load for one tick."""

    index: int  # the tick
    own: Sequence[Any]  # this worker's row indices: a range, an array or a list
    global_rows: int


class Source(ABC):
    """Rows that can be read in global batches by any number of workers."""

    rows: int | None = None  # in an epoch; None: nobody knows before the end
    batch_size: int | None = None  # the source's own, where it has one (a DataLoader)

    @abstractmethod
    def epoch_rows(self, reading: Reading) -> int | None:
        """Rows handed out in an epoch by such a reading. Raises BadInput where the source cannot be read so."""

    @abstractmethod
    def ticks(self, reading: Reading) -> int | None:
        """Global batches in an epoch; None: unsized."""

    @abstractmethod
    def slices(self, reading: Reading) -> Slices:
        """This worker's slices, from `first_tick` on. Closing the generator ends everything that it started."""

    def in_background(self, reading: Reading) -> bool:
        """Whether a thread may and should read ahead.

        Only a source that draws no random numbers may say so: the generators of torch, numpy and Python belong to the
        whole process, and a thread that draws from them makes dropout depend on timing.
        """
        return False


class Indexed(Source):
    """A source with random access: `rows` is known, and `take` loads any of them."""

    rows: int

    @abstractmethod
    def take(self, indices: Sequence[Any]) -> Any:
        """The batch of these rows: an int64 array, or a range for neighbours, never empty."""

    @override
    def epoch_rows(self, reading: Reading) -> int:
        return self.rows if reading.order is None else len(checked_order(reading.order, reading.epoch, self.rows))

    @override
    def ticks(self, reading: Reading) -> int:
        return ticks(self.epoch_rows(reading), reading.batch_size)

    @override
    def slices(self, reading: Reading) -> Slices:
        for pick in self.picks(reading):
            batch = self.take(pick.own) if len(pick.own) else None
            yield Slice(batch, len(pick.own), pick.global_rows, pick.index)

    def picks(self, reading: Reading) -> Iterator[Pick]:
        """The plan of this worker's epoch."""
        order = self._order(reading)
        for index in range(reading.first_tick, ticks(len(order), reading.batch_size)):
            whole = order[index * reading.batch_size : (index + 1) * reading.batch_size]
            start, stop = slice_of(len(whole), reading.rank, reading.size)
            yield Pick(index, whole[start:stop], len(whole))

    def _order(self, reading: Reading) -> Sequence[Any]:
        if reading.order is not None:
            return checked_order(reading.order, reading.epoch, self.rows)  # type: ignore[return-value]
        if not reading.shuffle:
            return range(self.rows)
        return epoch_order(self.rows, reading.seed, reading.epoch)  # type: ignore[return-value]


def checked_order(order: Order, epoch: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """order(epoch) as int64 indices. Raises BadInput for none, for anything but whole numbers, and for rows that are not there."""
    indices = np.asarray(order(epoch))
    if indices.ndim != 1 or indices.size == 0 or indices.dtype.kind not in "iu":
        raise BadInput(
            f"order({epoch}) must give row indices, whole numbers [n] with n ≥ 1; got {indices.dtype} of shape {list(indices.shape)}"
        )
    if indices.min() < 0 or indices.max() >= rows:
        raise BadInput(f"order({epoch}) must give row indices in range({rows}); got {indices.min()} to {indices.max()}")
    return indices.astype(np.int64, copy=False)


def nonempty(rows: int, what: str) -> int:
    """`rows`, or BadInput where there are none."""
    if rows == 0:
        raise BadInput(f"{what} has no rows: expected at least one. Is the file, filter or split the right one?")
    return rows
