"""Streams: rows that come one after another and whose number nobody knows before the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from typing_extensions import override

from manyhands.data.batch import Collate, digest_of, digest_of_rows, rows_of, slice_rows
from manyhands.data.loader_position import LoaderPosition, can_go_on
from manyhands.data.readers.datasets import end_processes, set_epoch
from manyhands.data.sharding import slice_of
from manyhands.data.shards.uncounted import DatasetReader, UncountedRows
from manyhands.data.source import (
    BY_OPTION,
    COMPARED,
    GlobalBatch,
    Loading,
    Reading,
    Slice,
    Slices,
    Unsized,
    check_goes_on,
)
from manyhands.errors import BadInput
from manyhands.rng import RngScope

T = TypeVar("T")


class Stream(Unsized):
    """An IterableDataset, or any iterable of rows; rows come in the stream's own order.

    Every worker reads the whole stream and keeps its slice of each global batch, so that N workers see what one sees. A
    stream that can be cut into shards (`shard(num_shards=, index=)`, as Hugging Face's) and has at least one for each
    worker is cut instead: each worker reads its own (`UncountedRows`), in slices of its share of the batch size.

    The stream draws from generators of its own, seeded by (seed, epoch), the same on all workers (by shard too where
    they read shards), so that a stream which shuffles gives every worker the same order, and a resumed epoch the same
    rows. Rows load in the caller's thread; with `processes` one process reads ahead (several would each read
    everything).
    """

    def __init__(self, rows: Callable[[], Iterable[Any]], collate: Collate | None = None, processes: int = 0) -> None:
        """`rows()` gives the iterable, anew each epoch."""
        self._open, self._collate = rows, collate or default_collate
        self.loading = Loading(1) if processes else Loading(0, BY_OPTION)

    @override
    def slices(self, reading: Reading) -> Slices:
        return _in_a_process(partial(self.read, reading)) if self.loading.processes else self.read(reading)

    def read(self, reading: Reading) -> Slices:
        """The slices, read here."""
        stream = self._open()
        set_epoch(stream, reading.epoch)
        shards = getattr(stream, "num_shards", 0) if callable(getattr(stream, "shard", None)) else 0
        begins = reading.size > 1 and shards >= reading.size and reading.first_tick == 0
        if begins or reading.shards is not None:
            yield from UncountedRows(DatasetReader(stream, self._collate)).slices(reading)
            return
        own, index = RngScope((reading.seed, reading.epoch)), -1
        for index, rows in enumerate(_chunks(stream, reading.batch_size, own)):
            if index >= reading.first_tick:
                start, stop = slice_of(len(rows), reading.rank, reading.size)
                batch, digest = self._batch(rows[start:stop], own), _digest(digest_of_rows, rows, reading, index)
                yield Slice(batch, stop - start, len(rows), index, reading.rank, digest)
        check_goes_on(reading.first_tick, index + 1)

    @override
    def global_batches(self, reading: Reading) -> Generator[GlobalBatch, None, None]:
        chunks = _in_a_process(partial(self.chunks, reading)) if self.loading.processes else self.chunks(reading)
        with closing(chunks):
            for index, rows in enumerate(chunks):
                cut = partial(self._cut, rows, (reading.seed, reading.epoch, index))
                yield GlobalBatch(len(rows), cut, partial(digest_of_rows, rows))

    def chunks(self, reading: Reading) -> Generator[list[Any], None, None]:
        """The rows of all global batches, read here."""
        stream = self._open()
        set_epoch(stream, reading.epoch)
        yield from _chunks(stream, reading.batch_size, RngScope((reading.seed, reading.epoch)))

    def _cut(self, rows: list[Any], key: tuple[int, ...], start: int, stop: int) -> Any:
        """However often it is cut, the stream draws what it would, and so does a collate function."""
        return self._batch(rows[start:stop], RngScope((*key, start, stop)))

    def _batch(self, rows: list[Any], own: RngScope) -> Any:
        if not rows:
            return None
        with own:
            return self._collate(rows)


class LoadedStream(Unsized):
    """A DataLoader whose batches come as they come: over an IterableDataset, without automatic batches, or from an
    `__iter__` of its own.

    Every worker iterates the whole loader (its processes included) and keeps its slice of each batch. One with
    `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) goes on by itself: where it stands is the same on
    all workers, whatever their number.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self.batch_size = loader, loader.batch_size
        self.loading = Loading(loader.num_workers, "num_workers")

    @override
    def epoch_rows(self, reading: Reading) -> None:
        super().epoch_rows(reading)
        if self.batch_size is not None and reading.batch_size != self.batch_size:
            raise BadInput(
                f"batch_size={reading.batch_size} was given, and the DataLoader makes batches of {self.batch_size}: "
                "leave batch_size out, or change the DataLoader"
            )

    @override
    def slices(self, reading: Reading) -> Slices:
        with closing(self._batches(reading)) as batches:
            for index, batch, position in batches:
                if index >= reading.first_tick:
                    rows = rows_of(batch)
                    start, stop = slice_of(rows, reading.rank, reading.size)
                    mine = batch if stop - start == rows else slice_rows(batch, start, stop) if stop > start else None
                    digest = _digest(digest_of, batch, reading, index)
                    yield Slice(mine, stop - start, rows, index, reading.rank, digest, loader=position)

    @override
    def global_batches(self, reading: Reading) -> Generator[GlobalBatch, None, None]:
        with closing(self._batches(reading)) as batches:
            for _, batch, _ in batches:
                yield GlobalBatch(rows_of(batch), partial(slice_rows, batch), partial(digest_of, batch))

    def _batches(self, reading: Reading) -> Generator[tuple[int, Any, LoaderPosition | None], None, None]:
        """(its number, a batch, where the loader stands after it). That is noted here: who reads ahead does not change it."""
        loader, own, first = self._loader, RngScope((reading.seed, reading.epoch)), 0
        set_epoch(loader.dataset, reading.epoch)
        position = reading.loader if reading.states else None
        if position is not None and position.fits(loader, reading.epoch, reading.first_tick):
            with own:
                batches = position.restored(loader)
            first, own = reading.first_tick, position.random.copy()
        else:
            with own:
                batches = iter(loader)
        try:
            for index in count(first):
                with own:
                    batch = next(batches, None)
                if batch is None:
                    _refuse_empty(index)
                    check_goes_on(reading.first_tick, index)
                    return
                yield index, batch, self._position(reading, index + 1, own)
        finally:
            end_processes(batches)

    def _position(self, reading: Reading, batches: int, own: RngScope) -> LoaderPosition | None:
        if not (reading.states and can_go_on(self._loader)):
            return None
        position = LoaderPosition.of(self._loader, reading.epoch, batches, own)
        if batches == 1:
            LoaderPosition.read(position.text())  # before a step is made: raises for what no checkpoint keeps
        return position


def _digest(of: Callable[[Any], str], batch: Any, reading: Reading, index: int) -> str:
    return of(batch) if reading.size > 1 and index < reading.first_tick + COMPARED else ""


def _chunks(stream: Iterable[Any], size: int, own: RngScope) -> Iterator[list[Any]]:
    """Rows in lists of `size`, the last one shorter; the stream's code runs under its own generators."""
    with own:
        rows = iter(stream)
    for index in count():
        with own:
            chunk = list(islice(rows, size))
        if not chunk:
            _refuse_empty(index)
            return
        yield chunk


def _refuse_empty(batches: int) -> None:
    if batches == 0:
        raise BadInput(
            "the stream gave no rows, and each epoch needs at least one. A generator can be read only once: give a "
            "function that makes a new one (train_data=lambda: read(...))"
        )


def _in_a_process(read: Callable[[], Iterator[T]]) -> Generator[T, None, None]:
    loader = DataLoader(_Items(read), batch_size=None, num_workers=1, generator=torch.Generator())
    items = iter(loader)
    try:
        yield from items
    finally:
        end_processes(items)


class _Items(IterableDataset[T]):
    """What a loader process reads for `_in_a_process`."""

    def __init__(self, read: Callable[[], Iterator[T]]) -> None:
        self._read = read

    @override
    def __iter__(self) -> Iterator[T]:
        return self._read()
