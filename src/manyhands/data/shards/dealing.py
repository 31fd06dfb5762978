"""Which workers read which blocks in an epoch: what `BlockOrder` comes to, without reading anything. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.sharding import slice_of
from manyhands.data.shards.block_order import BlockOrder


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Of one epoch, by worker."""

    rows: tuple[int, ...]
    blocks: tuple[frozenset[int], ...]
    """The numbers of those of which a worker reads rows."""
    lanes: tuple[int, ...]
    """How many a worker reads from in one global batch, at most: so many pieces are in use at a time. Where all rows
    are fewer than a batch, all lanes."""


def readers(order: BlockOrder, batch_size: int, workers: int) -> Readers:
    """Who reads what when global batches of so many rows are dealt to so many workers.

    Which worker takes a row of a lane repeats after lcm(batch size, lanes) rows, and each lane is one span a block. So a
    span that is longer than the period has the workers of its lane, and others are looked at row by row.
    """
    spans = list(order.spans())
    lanes = 1 + max((span.lane for span in spans), default=0)
    whole = order.total // batch_size  # batches
    turns, period = whole * batch_size, math.lcm(batch_size, lanes)
    worker = _workers_of_turns(min(period, turns), batch_size, lanes, workers)  # [turns of a period]
    by_lane = [np.unique(worker[lane::lanes]) for lane in range(lanes)]
    blocks: list[set[int]] = [set() for _ in range(workers)]
    for lane, block, start, stop in spans:
        stop = min(stop, -(-(turns - lane) // lanes))  # rows behind it are the last, short batch's
        if stop - start >= period // lanes:
            found = by_lane[lane]
        else:
            found = np.unique(worker[(np.arange(start, max(start, stop)) * lanes + lane) % period])
        for one in found:
            blocks[one].add(block)
    last = order.batch(turns, order.total)
    for one in range(workers):
        if len(own := last[slice(*slice_of(len(last), one, workers))]):
            blocks[one] |= {run.block for run in order.runs(own)}
    return Readers(
        rows=tuple(
            whole * _rows_of(batch_size, one, workers) + _rows_of(len(last), one, workers) for one in range(workers)
        ),
        blocks=tuple(map(frozenset, blocks)),
        lanes=tuple(_lanes_at_once(worker, batch_size, lanes, one) if whole else lanes for one in range(workers)),
    )


def _rows_of(batch: int, worker: int, workers: int) -> int:
    start, stop = slice_of(batch, worker, workers)
    return stop - start


def _workers_of_turns(turns: int, batch_size: int, lanes: int, workers: int) -> NDArray[Any]:
    """[turns] who takes each of the first rows; turns: of whole batches."""
    found = np.empty(turns, np.int64)
    slices = np.repeat(np.arange(workers), [_rows_of(batch_size, one, workers) for one in range(workers)])
    for start in range(0, turns, batch_size):
        by_lane = np.argsort(np.arange(start, start + batch_size) % lanes, kind="stable")
        found[start + by_lane] = slices
    return found


def _lanes_at_once(worker: NDArray[Any], batch_size: int, lanes: int, one: int) -> int:
    most = 0
    for start in range(0, len(worker), batch_size):
        own = np.flatnonzero(worker[start : start + batch_size] == one) + start
        most = max(most, len(np.unique(own % lanes)))
    return most
