"""Whether each row is handed out once, and whether N workers' slices are cut from what one worker reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from manyhands import rng
from manyhands.data.batch import columns, slice_rows
from manyhands.data.feed import Feed, Slice
from manyhands.data.open_source import open_source
from manyhands.data.readers.datasets import RowSource, fetch
from manyhands.data.sharding import slice_of
from manyhands.data.source import Planned, Reading, Source
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.copies import DATA, Copies, TrialConfig, configured, materialized_data
from manyhands.evidence.check.report import Results
from manyhands.evidence.check.source_locations import SourceLocation
from manyhands.task import Task
from manyhands.training.plan import global_batch

TICKS = 2  # global batches that are compared with their slices
MOST_ROWS = 2_000_000  # rows of larger epochs are not counted

_UNSEEDED = (
    "Two equal copies of the data, read in the same order with the same seeds, gave different rows: something in it is "
    "seeded by the time, or by nothing. Every worker has its own copy, so no two read the same data. Seed it by the "
    "task's seed and the row."
)
_RANDOM = (
    "{at} is not what one worker reads there: rows draw random numbers when they are read (augmentation), and each "
    "worker draws its own. So N workers equal one in distribution only, as with dropout. For the same rows draw from "
    "a generator that is seeded by the row's index."
)
_SHARDS = (
    "{at} is not cut from what one worker reads: the stream is cut into shards, each worker reads its own, and global "
    "batches hold other rows than on one worker. Every row is still read once; for the same batches give data with a "
    "length."
)
_COLLATE = (
    "{at} is not a part of the batch that one worker makes of the same rows: collate treats a row differently, "
    "depending on the other rows (padding to the longest, say), and the loss depends on it. Pad to a fixed length, or "
    "mask what is padded."
)
_ORDER = (
    "{at} holds other values than on one worker, for the same row numbers: a row's values depend on which rows were "
    "read before it, or how often. A worker reads only its own rows, so it gets other values. Make a row depend on its "
    "number alone."
)
_NOT_ONCE = (
    "Of {rows:,} rows that one worker takes in the first epoch, {workers} workers leave out {missing:,}, and take "
    "{more:,} other or repeated ones: the order is not the same on all workers. Each worker computes the order by "
    "itself, so it may depend on seed and epoch alone: draw it from a generator that is seeded by them, or leave it to "
    "manyhands (shuffle=True)."
)
_SORTED = (
    "shuffle=False, and the first {batches} batches hold one class each: rows are sorted. N workers still equal one, "
    "but a model learns badly from sorted rows, and strategies that average parameters suffer more. Leave shuffle=True."
)


@dataclass
class TrainingData:
    """The training data of a task, read through copies of it. The checks fill `results`."""

    copies: Copies
    config: TrialConfig
    workers: int
    results: Results = field(default_factory=Results)

    def task(self) -> Task:
        """A new copy of the task with this config."""
        return configured(self.copies.fresh(), self.config)

    def batches(self, ticks: int) -> tuple[Any, ...]:
        """The first global batches."""
        return tuple(part.batch for part in read(self.task(), ticks))

    # -- each row once -----------------------------------------------------------------------------------------------

    def check_once(self, proofs: Sequence[Sequence[list[Any] | None]]) -> None:
        """proofs: for each, the rows of one worker's first epoch, then those of each of N."""
        held = []
        for solo, *ranks in proofs:
            if solo is None or not ranks:
                continue
            expected = Counter(solo)
            got = Counter(row for rows in ranks for row in rows or ())
            if expected != got:
                missing, more = (expected - got).total(), (got - expected).total()
                numbers = {"missing": missing, "more": more, "rows": expected.total(), "workers": len(ranks)}
                text = _NOT_ONCE.format(**numbers)
                self.results.suspect("rows-not-once", DATA, text, self._order_place(), **numbers)
                return
            held.append(expected)
        if held:
            counts = [_counted(one, source_of(self.copies.fresh()).rows) for one in held]
            self.results.held.append(f"every row of the order is handed out once an epoch ({'; '.join(counts)})")

    def _order_place(self) -> SourceLocation | None:
        task = self.copies.fresh()
        if task.order is not None:
            return source_locations.of_function(task.order)
        data = task.train_data
        samplers = (data.sampler, data.batch_sampler) if isinstance(data, DataLoader) else ()
        found = (source_locations.of_method(sampler, "__iter__") for sampler in samplers)
        return next((place for place in found if place is not None), None) or _place_of(data)

    # -- the same rows -----------------------------------------------------------------------------------------------

    def check_slices(self) -> None:
        """Whether the slices of N workers are cut from the batches of one."""
        whole, again = (read(self.task(), TICKS) for _ in range(2))
        if not all(equal_values(a.batch, b.batch) for a, b in zip(whole, again, strict=False)):
            self.results.suspect("data-order", DATA, _UNSEEDED, self._place(changing=True))
            return
        ranks = [read(self.task(), TICKS, rank, self.workers) for rank in range(self.workers)]
        differs = self._first_difference(whole, ranks)
        if differs is None:
            self.results.held.append("slices are cut from the batches that one worker reads")
        else:
            self._explain(*differs, shards=any(part.global_rows is None for part in ranks[0]))

    def check_function(self, sent: Copies) -> None:
        """Whether the data function gives the same data when it is called again. sent: copies with the function."""
        again = materialized_data(sent)
        if again is None:
            return
        first, other = (read(task, 1)[0].batch for task in (self.task(), configured(again, self.config)))
        if not equal_values(first, other):
            place = _place_of(sent.fresh().train_data, changing=True)
            self.results.suspect("data-order", DATA, _UNSEEDED, place)

    def _first_difference(self, whole: Sequence[Slice], ranks: Sequence[Sequence[Slice]]) -> tuple[int, int] | None:
        """(tick, rank) of the first slice that differs from that part of one worker's batch."""
        for tick, one in enumerate(whole):
            for rank, parts in enumerate(ranks):
                start, stop = slice_of(one.rows, rank, self.workers)
                own = parts[tick].batch if tick < len(parts) else None
                if not equal_values(slice_rows(one.batch, start, stop) if stop > start else None, own):
                    return tick, rank
        return None

    def _explain(self, tick: int, rank: int, shards: bool) -> None:
        """Add the suspect for a slice that differs."""
        kind, text, place = "data-order", _ORDER, self._place(changing=True)
        task = self.task()
        before = rng.generator_states()
        with closing(feed_of(task).epoch(0)) as slices:
            next(slices)
        if rng.generator_states() != before:  # reading a batch draws
            kind, text, place = "random-rows", _RANDOM, self._place()
        elif shards:
            text, place = _SHARDS, self._place()
        elif self._equal_rows(tick, rank):
            task = self.copies.fresh()
            collate = task.train_data.collate_fn if isinstance(task.train_data, DataLoader) else task.collate
            kind, text, place = "collate", _COLLATE, source_locations.of_function(collate)
        self.results.suspect(kind, DATA, text.format(at=f"Batch {tick + 1} of worker {rank}"), place)

    def _equal_rows(self, tick: int, rank: int) -> bool:
        """Whether the rows are the same before they are collated."""
        whole = rows_of_batch(self.task(), tick, 0, 1)
        if whole is None:
            return False
        start, stop = slice_of(len(whole), rank, self.workers)
        return equal_values(whole[start:stop], rows_of_batch(self.task(), tick, rank, self.workers))

    def _place(self, changing: bool = False) -> SourceLocation | None:
        return _place_of(self.copies.fresh().train_data, changing)

    def check_sorted(self) -> None:
        """A note if rows are not shuffled and sorted by class."""
        task = self.copies.fresh()
        shuffled = task.shuffle or task.order is not None or isinstance(task.train_data, DataLoader)
        if shuffled or not isinstance(source_of(task), Planned):
            return
        parts = read(self.task(), TICKS)
        if all(_only_class(part.batch) is not None for part in parts):
            self.results.note("sorted-data", _SORTED.format(batches=len(parts)), self._place())


def _counted(handed_out: Counter[Any], rows: int | None) -> str:
    """`41`; `23 of 41` if the order leaves rows out; `60, 37 different of 41` if it repeats some."""
    total, distinct = handed_out.total(), len(handed_out)
    repeats = "" if distinct == total else f", {distinct:,} different"
    return f"{total:,}{repeats}" + ("" if rows is None or distinct == rows else f" of {rows:,}")


def _place_of(data: Any, changing: bool = False) -> SourceLocation | None:
    """Where rows are made; `changing`: the line there that changes the dataset object."""
    while isinstance(data, DataLoader | Subset):
        data = data.dataset
    find = source_locations.of_change if changing else source_locations.of_method
    found = find(data, "__getitem__", "__getitems__", "__iter__")
    if found is None and callable(data):
        found = source_locations.of_function(data)
    return found


def _only_class(batch: Any) -> int | None:
    """The only class of a batch whose last column holds whole numbers; None if there are several, or none."""
    leaves = [column for _, column in columns(batch) if isinstance(column, Tensor)]
    if len(leaves) < 2 or leaves[-1].dim() != 1 or leaves[-1].is_floating_point() or len(leaves[-1]) < 2:
        return None
    return int(leaves[-1][0]) if bool((leaves[-1] == leaves[-1][0]).all()) else None


# -- what workers read -------------------------------------------------------------------------------------------------


def source_of(task: Task) -> Source:
    """The training data as a worker opens it, without loader processes."""
    return open_source(task.train_data, collate=task.collate)


def feed_of(task: Task, rank: int = 0, size: int = 1) -> Feed:
    """The feed of one worker, as the training loop makes it."""
    source = source_of(task)
    return Feed(
        source,
        rank=rank,
        size=size,
        batch_size=global_batch(task, size, source.batch_size),
        seed=task.seed,
        shuffle=task.shuffle,
        order=task.order,
        threads=False,
    )


def read(task: Task, ticks: int, rank: int = 0, size: int = 1) -> list[Slice]:
    """The first slices of one worker, over as many epochs as needed; random generators are seeded by the task."""
    rng.seed_all(task.seed)
    feed, found = feed_of(task, rank, size), list[Slice]()
    for epoch in range(ticks):
        with closing(feed.epoch(epoch)) as slices:
            found += islice(slices, ticks - len(found))
        if len(found) == ticks:
            break
    return found


def handed_out(task: Task, rank: int, size: int) -> list[Any] | None:
    """The row numbers of one worker's first epoch; None if rows have no numbers or are more than `MOST_ROWS`."""
    source = source_of(task)
    if not isinstance(source, Planned) or source.rows > MOST_ROWS:
        return None
    picks = source.picks(_reading(task, source, rank, size))
    return [row for index in range(picks.batches) for row in _numbers(picks.at(index, rank).own)]


def rows_of_batch(task: Task, tick: int, rank: int, size: int) -> list[Any] | None:
    """The rows of one worker's slice before they are collated, read after all earlier ones.

    None if the dataset has no rows.
    """
    source = source_of(task)
    if not isinstance(source, RowSource):
        return None
    picks, rows = source.picks(_reading(task, source, rank, size)), list[Any]()
    rng.seed_all(task.seed)
    for index in range(tick + 1):
        rows = fetch(source.reader.dataset, _numbers(picks.at(index, rank).own))
    return rows


def _numbers(rows: Iterable[Any]) -> list[Any]:
    """Row numbers as Python's own integers."""
    return [int(row) if isinstance(row, np.integer) else row for row in rows]


def _reading(task: Task, source: Source, rank: int, size: int) -> Reading:
    batch_size = global_batch(task, size, source.batch_size)
    return Reading(rank=rank, size=size, batch_size=batch_size, seed=task.seed, shuffle=task.shuffle, order=task.order)


def evaluation_batch(task: Task, batch_size: int | None) -> Any | None:
    """The first batch of validation data, else of test data; None if the task has neither, or no `evaluate`."""
    data = task.validation_data if task.validation_data is not None else task.test_data
    if task.evaluate is None or data is None:
        return None
    source = open_source(data, collate=task.collate)
    feed = Feed(source, batch_size=source.batch_size or batch_size, seed=task.seed, shuffle=False, threads=False)
    with closing(feed.epoch(0)) as slices:
        return next(slices).batch


def equal_values(a: Any, b: Any) -> bool:
    """The same numbers in the same structure; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)
    if isinstance(a, np.ndarray) and a.dtype != object:
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_values, a, b))
    if is_dataclass(a):
        return all(equal_values(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, str | bytes | int | float | bool | None):
        return bool(a == b or (a != a and b != b))
    return bool(cloudpickle.dumps(a) == cloudpickle.dumps(b))
