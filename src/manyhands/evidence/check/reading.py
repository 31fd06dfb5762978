"""What workers read of a task's data."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from manyhands import rng
from manyhands.data.feed import Feed, Slice
from manyhands.data.readers.datasets import RowSource, fetch
from manyhands.data.source import Planned, Reading, Source
from manyhands.data.sources import open_source
from manyhands.evidence.check.generators import positions
from manyhands.task import Task
from manyhands.training.plan import global_batch

MOST_ROWS = 2_000_000
"""Of an epoch whose rows are counted one by one."""


def source_of(task: Task) -> Source:
    """As each worker opens it, without processes."""
    return open_source(task.train_data, collate=task.collate)


def feed_of(task: Task, rank: int = 0, size: int = 1) -> Feed:
    """What one worker reads, as the loop has it."""
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
    """The first slices of one worker, epoch after epoch, from generators seeded alike for all."""
    rng.seed_all(task.seed)
    feed, found = feed_of(task, rank, size), list[Slice]()
    for epoch in range(ticks):
        with closing(feed.epoch(epoch)) as slices:
            found += islice(slices, ticks - len(found))
        if len(found) == ticks:
            break
    return found


def draws(task: Task) -> bool:
    """Whether reading a batch draws from the generators that the seed sets."""
    before = positions()
    with closing(feed_of(task).epoch(0)) as slices:
        next(slices)
    return positions() != before


def handed_out(task: Task, rank: int, size: int) -> list[Any] | None:
    """The row numbers that one worker takes in the first epoch; None where rows have none, or are too many to be counted."""
    source = source_of(task)
    if not isinstance(source, Planned) or source.rows > MOST_ROWS:
        return None
    picks = source.picks(_reading(task, source, rank, size))
    return [plain(row) for index in range(picks.batches) for row in picks.at(index, rank).own]


def rows_of_batch(task: Task, tick: int, rank: int, size: int) -> list[Any] | None:
    """The rows of one worker's slice before they are made a batch, read after all earlier ones; None where a dataset does not give rows."""
    source = source_of(task)
    if not isinstance(source, RowSource):
        return None
    picks, rows = source.picks(_reading(task, source, rank, size)), list[Any]()
    rng.seed_all(task.seed)
    for index in range(tick + 1):
        rows = fetch(source.reader.dataset, [plain(row) for row in picks.at(index, rank).own])
    return rows


def _reading(task: Task, source: Source, rank: int, size: int) -> Reading:
    batch_size = global_batch(task, size, source.batch_size)
    return Reading(rank=rank, size=size, batch_size=batch_size, seed=task.seed, shuffle=task.shuffle, order=task.order)


def evaluated(task: Task, batch_size: int | None) -> Any | None:
    """A batch on which the task's own `evaluate` runs, of validation or test data; None where there is none."""
    data = task.validation_data if task.validation_data is not None else task.test_data
    if task.evaluate is None or data is None:
        return None
    source = open_source(data, collate=task.collate)
    feed = Feed(source, batch_size=source.batch_size or batch_size, seed=task.seed, shuffle=False, threads=False)
    with closing(feed.epoch(0)) as slices:
        return next(slices).batch


def plain(row: Any) -> Any:
    """A row's number as Python has it."""
    return int(row) if isinstance(row, np.integer) else row


def alike(a: Any, b: Any) -> bool:
    """The same numbers in the same structure; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_numbers(a), _numbers(b))
    if isinstance(a, np.ndarray) and a.dtype != object:
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if is_dataclass(a):
        return all(alike(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, str | bytes | int | float | bool | None):
        return bool(a == b or (a != a and b != b))
    return bool(cloudpickle.dumps(a) == cloudpickle.dumps(b))


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor
