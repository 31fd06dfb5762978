"""A feed: what one worker reads of a source, epoch by epoch, on its device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

from manyhands.data.batch import columns, to_device
from manyhands.data.kept_batches import KeptBatches
from manyhands.data.leases import End, Lease, Segment, foreseen
from manyhands.data.loader_position import LoaderPosition
from manyhands.data.sharding import FixedPartition
from manyhands.data.slice_ledger import Place
from manyhands.data.source import (
    COMPARED,
    Indexed,
    Order,
    Pick,
    Picks,
    Planned,
    Reading,
    ShardPositions,
    Slice,
    Slices,
    Source,
    Unsized,
)
from manyhands.errors import BadInput

__all__ = ["DEFAULT_BATCH_SIZE", "Feed", "Slice"]

DEFAULT_BATCH_SIZE = 64
DEPTH = 2  # one batch in hand, one being read: more only helps where reading times vary widely
CHECK_S = 1.0  # between looks whether the thread still lives
CLOSE_S = 10.0  # for the item under way when the consumer closes

T = TypeVar("T")


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
        partition: str = "none",
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        threads: bool = True,
        keeps: bool = False,
        states: bool = False,
    ) -> None:
        """`batch_size` is global; default: the source's own, else 64. `order`: epoch -> row indices, the same on all
        ranks. partition: "fixed" where each rank's rows are one part of the data, the same in all epochs.
        threads: whether a thread may read ahead.
        keeps: a stream is read whole, shards too, and what `keep_from` names can be read again.
        states: as in Reading.

        Raises BadInput for fewer than one row a worker, a rank not in range(size), and what the source cannot do.
        """
        self.source, self.device, self._threads = source, device, threads
        self.batch_size = batch_size or source.batch_size or DEFAULT_BATCH_SIZE
        check_shard(rank, size, self.batch_size)
        if partition == "fixed":
            check_partition(source, size, order is not None)
            assert source.rows is not None
            order = FixedPartition(rows=source.rows, batch_size=self.batch_size, parts=size, seed=seed, shuffle=shuffle)
        self._reading = Reading(
            rank=rank, size=size, batch_size=self.batch_size, seed=seed, shuffle=shuffle, order=order, states=states
        )
        self.rows = source.epoch_rows(self._reading)
        """Handed out in an epoch by all workers together; None: unsized."""
        self.ticks = source.ticks(self._reading)
        """Global batches an epoch, the same on all workers; None: unsized."""
        self.leasable = isinstance(source, Planned)
        """Whether any worker can read any slice; else each reads its own, whatever is leased."""
        self._begun: tuple[int, ShardPositions | None, LoaderPosition | None] | None = None
        self._kept = KeptBatches(source) if keeps and isinstance(source, Unsized) else None
        self.rereads = self.leasable or self._kept is not None
        """Whether `read` gives slices again that were another worker's."""

    def set_shard(self, rank: int, size: int) -> None:
        """From the next epoch or segment on, this is worker `rank` of `size`: the global batches stay as they are.

        Raises BadInput for fewer rows in a global batch than workers.
        """
        check_shard(rank, size, self.batch_size)
        self._reading = replace(self._reading, rank=rank, size=size)

    def go_on(self, epoch: int, shards: ShardPositions | None = None, loader: LoaderPosition | None = None) -> None:
        """This epoch was begun before: so much of its shards is out, and here its loader stood."""
        self._begun = epoch, shards, loader

    def epoch(self, epoch: int, first_tick: int = 0) -> Slices:
        """This worker's slices of an epoch from `first_tick` on.

        Sized: exactly one a tick, some empty. Unsized: until this worker's rows are out. Earlier ticks are not loaded
        (a stream reads and drops them). Closing the generator, or dropping it, ends threads and processes at once.
        """
        reading = self._of_epoch(epoch, first_tick)
        slices = self.source.slices(reading) if self._kept is None else self._kept_slices(self._kept, reading)
        if self._threads and self._kept is None and self.source.in_background(reading):
            slices = prefetch(slices, most=self.source.ahead_bytes, size=_bytes)
        with closing(slices):
            for part in slices:
                yield self._here(part)

    def leased(
        self, segment: Segment, take: Callable[[], Lease | End], *, ahead: bool = True
    ) -> Generator[Slice, None, End]:
        """The slices that `take()` leases to this worker, one after the other, until it gives the End, which is
        returned.

        Sized: the slices are those of `epoch`, with `segment.parts` in place of the number of workers; all workers
        together get each exactly once. A lease is taken only when its slice is asked for, so that what nobody has begun
        is free for others. Where `epoch` would read ahead in a thread or in processes, this worker's own queues are
        read ahead, without being leased; what was another's is loaded here when it comes.

        ahead: else nothing is read before it is leased.

        Unsized: a stream has no slices to lease. Each worker reads its own, as `epoch` does from batch `segment.first`
        on, and `take` is never called.
        """
        source = self.source
        if not isinstance(source, Planned):  # `leasable`, as mypy sees it
            yield from self.epoch(segment.epoch, segment.first)
            return End(reason="", left=[])
        rank, parts = self._reading.rank, segment.parts
        reading = replace(self._of_epoch(segment.epoch, segment.first), rank=rank % parts, size=parts)
        picks, coming = source.picks(reading), None
        if ahead and (source.in_processes or (self._threads and source.in_background(reading))):
            # Loading is not leasing: what others took meanwhile was loaded in vain, and is thrown away.
            own = source.load((picks.at(lease.index, lease.part) for lease in foreseen(segment, rank)), reading)
            coming = own if source.in_processes else prefetch(own, most=source.ahead_bytes, size=_bytes)
        try:
            while isinstance(lease := take(), Lease):
                if coming is not None and segment.owner(lease.part) == rank and not lease.again:
                    part = next(s for s in coming if (s.index, s.part) == (lease.index, lease.part))
                else:
                    if coming is not None and not lease.again:  # its own queues are empty: nothing more is read ahead
                        coming.close()
                    part = source.load_here(picks.at(lease.index, lease.part), reading)
                yield self._here(part)
        finally:
            if coming is not None:
                coming.close()
        return lease

    def read(self, epoch: int, places: Iterable[Place]) -> Iterator[Slice]:
        """These slices of an epoch, whoever's they are, in this order. Sized: as `leased`."""
        if self._kept is not None:
            yield from (self._here(self._kept.again(self._of_epoch(epoch, 0), place)) for place in places)
            return
        for pick, reading in self._picked(epoch, places):
            yield self._here(self.source.load_here(pick, reading))  # type: ignore[attr-defined]

    def rows_of(self, epoch: int, places: Iterable[Place]) -> int:
        """Of these slices together."""
        if self._kept is not None:
            return sum(self._kept.rows(self._of_epoch(epoch, 0), place) for place in places)
        return sum(len(pick.own) for pick, _ in self._picked(epoch, places))

    def keep_from(self, epoch: int, tick: int) -> None:
        """Of an epoch, nobody reads what is before this global batch any more."""
        if self._kept is not None:
            self._kept.keep_from(epoch, tick)

    def close(self) -> None:
        """End what still reads a stream. Idempotent."""
        if self._kept is not None:
            self._kept.close()

    def _kept_slices(self, kept: KeptBatches, reading: Reading) -> Slices:
        for index in count(reading.first_tick):
            compared = reading.size > 1 and index < reading.first_tick + COMPARED
            part = kept.slice(reading, Place(index, reading.rank, reading.size), digest=compared)
            if part is None:
                return
            if index == reading.first_tick:
                kept.keep_from(reading.epoch, index)
            yield part

    def _picked(self, epoch: int, places: Iterable[Place]) -> Iterator[tuple[Pick, Reading]]:
        assert isinstance(self.source, Planned)
        plans: dict[int, tuple[Picks, Reading]] = {}  # by slices of a global batch
        for tick, part, parts in places:
            if parts not in plans:
                reading = replace(self._of_epoch(epoch, 0), rank=0, size=parts)
                plans[parts] = self.source.picks(reading), reading
            picks, reading = plans[parts]
            yield picks.at(tick, part), reading

    def _of_epoch(self, epoch: int, first_tick: int) -> Reading:
        reading = replace(self._reading, epoch=epoch, first_tick=first_tick)
        if self._begun is not None and self._begun[0] == epoch:
            reading = replace(reading, shards=self._begun[1], loader=self._begun[2])
        if reading.order is not None and self.source.epoch_rows(reading) != self.rows:
            raise BadInput(
                f"order({epoch}) has length {self.source.epoch_rows(reading)}, and order(0) had length {self.rows}: "
                "return equally many row numbers in each epoch"
            )
        return reading

    def _here(self, part: Slice) -> Slice:
        if part.batch is None or self.device.type == "cpu":
            return part
        return replace(part, batch=to_device(part.batch, self.device))


def check_kind(partition: str) -> None:
    """Raise BadInput for what is no kind of partition."""
    if partition not in ("none", "fixed"):
        raise BadInput(f'partition must be "none" or "fixed", not {partition!r}')


def check_partition(source: Source, workers: int, ordered: bool) -> None:
    """Raise BadInput where workers cannot each keep one part of the source's rows."""
    todo = 'leave partition out, or give partition="none"'
    if ordered:
        raise BadInput(f"partition=fixed says which rows a worker has, and so does the task's order: {todo}")
    if not isinstance(source, Indexed):
        kind = source.named_by if isinstance(source, Planned) else "a stream has no row numbers"
        raise BadInput(f"partition=fixed deals rows by their numbers, and {kind}: give a dataset or tensors, or {todo}")
    if source.rows < workers:
        raise BadInput(
            f"partition=fixed gives each worker a part of the rows, and there are {source.rows} for {workers} workers: use fewer workers, or {todo}"
        )


def check_shard(rank: int, size: int, batch_size: int) -> None:
    """BadInput for a rank that is none of `size` workers', and for fewer rows in a global batch than workers."""
    if not 0 <= rank < size:
        raise BadInput(f"rank must be in range(size), not rank={rank} of size={size}")
    if batch_size < size:
        raise BadInput(
            f"batch_size={batch_size} leaves some of the {size} workers without a row: raise it to at least {size}, or "
            "use fewer workers"
        )


def _bytes(part: Slice) -> int:
    """About as many as a slice's batch has in memory."""
    return 0 if part.batch is None else sum(_bytes_of(column) for _, column in columns(part.batch))


def _bytes_of(value: Any) -> int:
    """Of a column or what it holds: texts, bytes and arrays as long as they are, other objects as a few numbers."""
    if isinstance(value, str | bytes):
        return 64 + len(value)
    if isinstance(value, Mapping):
        return 64 + sum(map(_bytes_of, value.values()))
    if isinstance(value, list | tuple) or getattr(value, "dtype", None) == np.dtype(object):
        if len(value) and isinstance(value[0], int | float):
            return 32 * len(value)
        return 64 + sum(map(_bytes_of, value))
    return int(getattr(value, "nbytes", 64))


def prefetch(
    items: Generator[T, None, None], depth: int = DEPTH, most: int = 0, size: Callable[[T], int] = lambda item: 0
) -> Generator[T, None, None]:
    """The same items in the same order, read ahead by a thread: up to `depth`, and further up to `most` of their sizes.

    The thread starts with the first `next()`. An exception of `items` comes out where its item would have, with its own
    traceback. Closing (or dropping) the generator ends the thread, which closes `items`; an item under way is
    waited for up to CLOSE_S, then TimeoutError. A consumer waits as long as an item takes: it is the run's `timeout_s`
    that ends a read which never comes back.
    """
    ready: SimpleQueue[tuple[T, int] | None] = SimpleQueue()  # with their sizes; None: no more comes
    changed = threading.Condition()  # what the thread waits for when it is far enough ahead
    waits = False  # the thread does
    closed = False  # the consumer wants no more
    read = read_size = 0  # written by the thread alone
    taken = taken_size = 0  # by the consumer alone
    error: BaseException | None = None  # why the thread ended, if it failed

    def wanted() -> bool:
        return closed or read - taken < depth or read_size - taken_size < most

    def produce() -> None:
        nonlocal waits, read, read_size, error
        try:
            for item in items:
                if not wanted():
                    with changed:
                        waits = True
                        changed.wait_for(wanted)
                        waits = False
                if closed:
                    return
                its_size = size(item)
                read, read_size = read + 1, read_size + its_size
                ready.put((item, its_size))
        except BaseException as problem:  # noqa: BLE001 - not swallowed: the consumer raises it
            error = problem
        finally:
            items.close()
            ready.put(None)

    thread = threading.Thread(target=produce, name="manyhands-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            try:
                found = ready.get(timeout=CHECK_S)
            except Empty:
                if thread.is_alive() or not ready.empty():
                    continue
                raise RuntimeError(
                    "the thread that reads the data ended without an error: please report this, with the kind of your data"
                ) from None
            if found is None:
                break
            item, its_size = found
            taken, taken_size = taken + 1, taken_size + its_size
            if waits:
                with changed:
                    changed.notify_all()
            yield item
        if error is not None:
            raise error
    finally:
        with changed:
            closed = True
            changed.notify_all()
        thread.join(CLOSE_S)
        if thread.is_alive():
            raise TimeoutError(
                f"the data could not be closed within {CLOSE_S:g} s, because the dataset or stream is still reading an "
                "item: check what it waits for"
            )
