"""Who reads which rows: the order of an epoch, and each worker's slice of a global batch. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
