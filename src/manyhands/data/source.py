"""The contract of a source: it reads, for one worker, that worker's slice of each global batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from manyhands.data.input_counters import InputCounters
from manyhands.data.loader_position import LoaderPosition
from manyhands.data.sharding import Indices, epoch_order, shared, slice_of, ticks
from manyhands.errors import BadInput

Order = Callable[[int], Any]  # epoch -> row indices
COMPARED = 2  # batches of a pass: the second comes after the first backward


@dataclass(frozen=True, kw_only=True)
class ShardPositions:
    """How many rows are out of each shard of an epoch, where nobody knows how many it has; JSON by `vars`. -1: all of it."""

    size: int = 0
    """Workers among whom the shards were dealt; 0: they were not yet."""
    begun: Mapping[str, int] = field(default_factory=dict)
    """By shard, when they were dealt; 0 where it lacks."""
    read: Mapping[str, int] = field(default_factory=dict)
    """By shard, what has changed since."""

    def now(self, shard: int) -> int:
        return self.read.get(str(shard), self.begun.get(str(shard), 0))

    @classmethod
    def together(cls, found: Sequence[ShardPositions]) -> ShardPositions:
        """What all workers know of one deal: of each shard, the furthest."""
        read: dict[str, int] = {}
        for shard, rows in (item for own in found for item in own.read.items()):
            before = read.get(shard, 0)
            read[shard] = -1 if -1 in (rows, before) else max(rows, before)
        return cls(size=found[0].size, begun=found[0].begun, read=read)


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
    """The tick within the epoch: the number of the global batch."""
    part: int = 0
    """Which slice of that batch it is: the worker's rank, unless it was leased."""
    digest: str = ""
    """Of the whole batch, where every worker reads it for itself; of the first `COMPARED` batches of a reading only."""
    dealt: ShardPositions | None = None
    """How the shards of this epoch were dealt, where nobody has counted their rows."""
    read: Mapping[str, int] = field(default_factory=dict)
    """By shard, how many rows are out once this slice is trained on."""
    loader: LoaderPosition | None = None
    """Where the loader that gave it stands, once this slice is trained on; see `Reading.states`."""


EMPTY = Slice(batch=None, rows=0, global_rows=None, index=-1)
"""Of a worker that has no rows while others have some."""
Slices = Generator[Slice, None, None]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which rows of a source one worker wants in one epoch."""

    rank: int = 0
    size: int = 1
    """Slices of a global batch."""
    batch_size: int = 64
    """Global."""
    seed: int = 0
    shuffle: bool = True
    order: Order | None = None
    epoch: int = 0
    first_tick: int = 0
    """Ticks before it are not read (a stream reads and drops them)."""
    shards: ShardPositions | None = None
    """Of an epoch that goes on: what of its shards is out."""
    loader: LoaderPosition | None = None
    """Of an epoch that goes on: where its loader stood."""
    states: bool = False
    """Whether slices say where a loader stands that can go on from there by itself, and it does."""


@dataclass(frozen=True, slots=True)
class Pick:
    """What one worker is to load: one slice of one global batch."""

    index: int  # the tick
    own: Sequence[Any]  # this slice's row indices: a range, an array or a list
    global_rows: int
    part: int = 0

    def load(self, take: Callable[[Sequence[Any]], Any]) -> Slice:
        """The slice; `take` gives the batch of its rows, if it has any."""
        batch = take(self.own) if len(self.own) else None
        return Slice(batch, len(self.own), self.global_rows, self.index, self.part)


@dataclass(frozen=True)
class Picks:
    """The plan of an epoch, the same on all workers: any slice of any global batch."""

    whole: Callable[[int], Any]  # the number of a global batch -> its row indices
    batches: int
    parts: int  # slices of each

    def at(self, index: int, part: int) -> Pick:
        rows = self.whole(index)
        start, stop = slice_of(len(rows), part, self.parts)
        return Pick(index, rows[start:stop], len(rows), part)


@dataclass(frozen=True)
class Loading:
    """How many processes load a source's rows, and what sets their number."""

    processes: int = 0
    option: str = ""
    """`--loader-processes`, or `num_workers` of a DataLoader; "" where more would do nothing: rows lie in memory or in
    files that are read as columns, or one process reads all of a stream."""


BY_OPTION = "--loader-processes"


class Source(ABC):
    """Rows that can be read in global batches by any number of workers."""

    rows: int | None = None  # in an epoch; None: nobody knows before the end
    batch_size: int | None = None  # the source's own, where it has one (a DataLoader)
    loading = Loading()
    ahead_bytes = 0
    """Of batches that a thread may read ahead; 0: two batches, whatever their size."""
    counters: InputCounters | None = None
    """What reading cost this process, where the source counts that."""
    stored_bytes = 0
    """Of its files, where it counts."""

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


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch of a stream, out of which any worker's slice can be cut, once or more often."""

    rows: int
    cut: Callable[[int, int], Any]
    """Of [start, stop) of its rows, a batch."""
    digest: Callable[[], str]
    """Of the whole."""


class Unsized(Source):
    """Rows without numbers, which come one after another."""

    @override
    def epoch_rows(self, reading: Reading) -> None:
        if reading.order is not None:
            raise BadInput(
                "order was given, and a stream has no row numbers: shuffle inside the stream, or give data with a "
                "length"
            )

    @override
    def ticks(self, reading: Reading) -> None:
        return None

    @abstractmethod
    def global_batches(self, reading: Reading) -> Generator[GlobalBatch, None, None]:
        """All of an epoch, from the first one on, whatever the rank and size of the reading: shards are read, too."""


class Planned(Source):
    """A source with random access: which rows an epoch has, and in which order, is known before they are loaded."""

    rows: int
    named_by = "a DataLoader's sampler names them"
    """Why rows are not asked for by their numbers, of one that is no Indexed."""

    @abstractmethod
    def picks(self, reading: Reading) -> Picks:
        """Begin an epoch: its plan."""

    @abstractmethod
    def load(self, picks: Iterator[Pick], reading: Reading) -> Slices:
        """Load what is picked, in that order, no sooner than it is asked for unless loader processes do it."""

    @abstractmethod
    def samples(self, count: int) -> Sequence[Any] | None:
        """About so many rows, as a Pick, the same on all workers; None where only a user's sampler can name rows."""

    def load_here(self, pick: Pick, reading: Reading) -> Slice:
        """Load one slice in this process, the same bits as `load`."""
        return next(self.load(iter([pick]), reading))

    @property
    def in_processes(self) -> bool:
        """Whether loader processes read ahead."""
        return self.loading.processes > 0

    @override
    def slices(self, reading: Reading) -> Slices:
        picks = self.picks(reading)
        own = (picks.at(index, reading.rank) for index in range(reading.first_tick, picks.batches))
        return self.load(own, reading)


class Indexed(Planned):
    """A source whose rows are numbered: `take` loads any of them."""

    @abstractmethod
    def take(self, indices: Sequence[Any]) -> Any:
        """The batch of these rows: an int64 array, or a range for neighbours, never empty."""

    @override
    def samples(self, count: int) -> Sequence[Any]:
        return np.array(spread(self.rows, count))  # type: ignore[return-value]

    @override
    def epoch_rows(self, reading: Reading) -> int:
        return self.rows if reading.order is None else len(checked_order(reading.order, reading.epoch, self.rows))

    @override
    def ticks(self, reading: Reading) -> int:
        return ticks(self.epoch_rows(reading), reading.batch_size)

    @override
    def load(self, picks: Iterator[Pick], reading: Reading) -> Slices:
        for pick in picks:
            yield pick.load(self.take)

    @override
    def picks(self, reading: Reading) -> Picks:
        order: Any = range(self.rows)
        if reading.order is not None:
            order = checked_order(reading.order, reading.epoch, self.rows)
        elif reading.shuffle:
            order = shared(epoch_order, self.rows, reading.seed, reading.epoch)
        size = reading.batch_size
        return Picks(lambda index: order[index * size : (index + 1) * size], ticks(len(order), size), reading.size)


def spread(rows: int, count: int) -> list[int]:
    """Up to so many of the row numbers below `rows`, the first and the last among them."""
    return sorted({i * (rows - 1) // max(1, count - 1) for i in range(count)})


def checked_order(order: Order, epoch: int, rows: int) -> Indices:
    """order(epoch) as int64 indices, `shared` by all workers of a process.

    Raises BadInput for none, for anything but whole numbers, and for rows that are not there.
    """
    if getattr(order, "__hash__", None) is None:  # a dataclass that is called, say
        return _checked(order, epoch, rows)
    return shared(_checked, order, epoch, rows)


def _checked(order: Order, epoch: int, rows: int) -> Indices:
    indices = np.asarray(order(epoch))
    if indices.ndim != 1 or indices.size == 0 or indices.dtype.kind not in "iu":
        raise BadInput(
            f"order({epoch}) must return whole row numbers in one dimension, at least one; got {indices.dtype} of "
            f"shape {list(indices.shape)}"
        )
    if indices.min() < 0 or indices.max() >= rows:
        raise BadInput(
            f"order({epoch}) must return row numbers from 0 to {rows - 1}; got {indices.min()} to {indices.max()}"
        )
    return np.ascontiguousarray(indices, dtype=np.int64)


def check_digests(digests: Sequence[Any]) -> None:
    """Raise BadInput where workers that each read all data for themselves did not read the same.

    digests: by rank; "" of one that reads a shard of its own, None where the data was out.
    """
    if "" in digests:
        return
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise BadInput(
                f"workers 0 and {rank} read different batches (digests {digests[0]} and {theirs}). Each worker must "
                "read the same whole batches: do not select rows by rank in the loader, and seed its random numbers "
                "alike on all workers"
            )


def check_goes_on(first_tick: int, batches: int) -> None:
    """Raise BadInput where an epoch is to go on behind the end of its stream."""
    if batches < first_tick:
        raise BadInput(
            f"the run goes on after {first_tick} batches of this epoch, and the stream has {batches}: give the data that the run began with, or begin "
            "in another run directory"
        )


def nonempty(rows: int, what: str) -> int:
    """`rows`, or BadInput where there are none."""
    if rows == 0:
        raise BadInput(f"{what} has no rows: expected at least one. Is the file, filter or split the right one?")
    return rows
