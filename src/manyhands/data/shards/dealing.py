"""Which workers read which blocks in an epoch: what `BlockOrder` comes to, without reading anything. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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
    open: tuple[int, ...]
    """From how many blocks a worker reads at a time, at most."""


def readers(order: BlockOrder, batch_size: int, workers: int) -> Readers:
    """Who reads what when global batches of so many rows are dealt to so many workers.

    While the same blocks are open, who takes rows of which slot repeats after at most as many batches as there are slots.
    Batches in which a block ends are looked at row by row.
    """
    blocks: list[set[int]] = [set() for _ in range(workers)]
    most_open = [0] * workers
    mixed = set[int]()  # batches in which the open blocks change
    for first, end, opened in order.open_blocks():
        mixed |= {at // batch_size for at in (first, end) if at % batch_size}
        begin, stop = -(-first // batch_size), end // batch_size
        if begin < stop:
            slots = len(opened)
            batches = min(stop - begin, slots // math.gcd(slots, batch_size))
            taken = _takers(slots, (begin * batch_size - first) % slots, batches, batch_size, workers)
            for one in range(workers):
                own = opened[taken[one]]
                blocks[one].update(own.tolist())
                most_open[one] = max(most_open[one], len(own))
    for batch in mixed:
        found = order.blocks_of(order.batch(batch * batch_size, (batch + 1) * batch_size))
        for one in range(workers):
            own = np.unique(found[slice(*slice_of(len(found), one, workers))])
            blocks[one].update(own.tolist())
            most_open[one] = max(most_open[one], len(own))
    whole, rest = divmod(order.total, batch_size)
    rows = (whole * _share(batch_size, one, workers) + _share(rest, one, workers) for one in range(workers))
    return Readers(rows=tuple(rows), blocks=tuple(map(frozenset, blocks)), open=tuple(most_open))


@lru_cache(1024)
def _takers(slots: int, offset: int, batches: int, batch_size: int, workers: int) -> NDArray[np.bool_]:
    """[workers, slots] who takes rows of which slot in so many batches, the first of which begins at slot `offset`."""
    taken = np.zeros((workers, slots), np.bool_)
    for batch in range(batches):
        by_slot = np.sort((offset + batch * batch_size + np.arange(batch_size)) % slots)
        for one in range(workers):
            taken[one, by_slot[slice(*slice_of(batch_size, one, workers))]] = True
    return taken


def _share(rows: int, worker: int, workers: int) -> int:
    start, stop = slice_of(rows, worker, workers)
    return stop - start
