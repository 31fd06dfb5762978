"""How far rows are from touching each other's features: the numbers on which HOGWILD!'s bounds depend.

Source: Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, Feng Niu, Benjamin Recht,
Christopher Ré, Stephen J. Wright, 2011, section 3, equation 6.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.sparse.compile import compiled
from manyhands.sparse.kernel import Touched

Array = NDArray[Any]

_VISITS_AT_ONCE = 1 << 26  # of rows by features, about a tenth of a second: then the clock is read


@dataclass(frozen=True)
class Sparsity:
    """Of sparse rows. Shares are in 0 to 1."""

    omega: int
    """Ω: the most features of one row."""
    delta: float
    """Δ: the greatest share of rows that have one and the same feature."""
    rho: float
    """ρ: the greatest share of rows that have a feature in common with one and the same row, itself included. It is at
    least this."""
    rho_at_most: float
    """It is at most this; the same as `rho` where it was found within the time."""

    @property
    def is_exact(self) -> bool:
        return self.rho == self.rho_at_most


def sparsity(rows: Touched, *, seconds: float = 2.0) -> Sparsity:
    """Ω, Δ and ρ of rows and the keys that they touch, which a `Csr` is, too. ρ is exact where branch and bound ends within `seconds`, else between two bounds.

    A row meets at most as many rows as its features have in sum. Rows are counted out in falling order of this bound,
    until the next one's bound is no more than the most that was found.
    """
    numbers, n = rows.numbers(), len(rows)
    if not n or not len(rows.keys):
        return Sparsity(0, 0.0, 0.0, 0.0)
    starts, holders, bounds, omega = _rows_by_feature(numbers, rows.offsets, rows.keys, rows.features)
    delta = float(np.diff(starts).max() / n)
    np.minimum(bounds, n, out=bounds)
    order = np.argsort(-bounds, kind="stable")
    last_met, begun = np.full(n, -1, np.int64), time.monotonic()
    most, at = np.int64(bounds.any()), 0
    while at < n and bounds[order[at]] > most:
        if at and time.monotonic() - begun > seconds:
            return Sparsity(int(omega), delta, float(most / n), float(bounds[order[at]] / n))
        most, at = _count_out(
            order, at, most, bounds, numbers, rows.offsets, rows.keys, starts, holders, last_met, _VISITS_AT_ONCE
        )
    return Sparsity(int(omega), delta, float(most / n), float(most / n))


@compiled
def _rows_by_feature(numbers: Array, offsets: Array, keys: Array, features: int) -> Any:
    """(where each feature's rows begin [features + 1], rows by feature, each row's bound, most features of a row)."""
    starts, omega = np.zeros(features + 1, np.int64), 0
    for row in numbers:
        omega = max(omega, offsets[row + 1] - offsets[row])
        for i in range(np.uint64(offsets[row]), np.uint64(offsets[row + 1])):
            starts[np.uint64(keys[np.uint64(i)]) + np.uint64(1)] += 1
    for feature in range(features):
        starts[feature + 1] += starts[feature]
    holders, filled, bounds = np.empty(starts[features], np.int32), starts[:-1].copy(), np.zeros(len(numbers), np.int64)
    for n in range(len(numbers)):
        row = numbers[n]
        for i in range(np.uint64(offsets[row]), np.uint64(offsets[row + 1])):
            key = np.uint64(keys[np.uint64(i)])
            holders[filled[key]] = n
            filled[key] += 1
            bounds[n] += starts[key + np.uint64(1)] - starts[key]
    return starts, holders, bounds, omega


@compiled
def _count_out(
    order: Array,
    at: int,
    most: int,
    bounds: Array,
    numbers: Array,
    offsets: Array,
    keys: Array,
    starts: Array,
    holders: Array,
    last_met: Array,
    visits: int,
) -> tuple[int, int]:
    """Count the rows that each row meets, from order[at] on, until no bound exceeds `most` or after so many visits of rows:
    (most, where it stopped). last_met [rows]: by whom a row was last met."""
    while at < len(order) and visits > 0 and bounds[order[at]] > most:
        mine = order[at]
        row, met = numbers[mine], 0
        for i in range(np.uint64(offsets[row]), np.uint64(offsets[row + 1])):
            key = np.uint64(keys[np.uint64(i)])
            for j in range(np.uint64(starts[key]), np.uint64(starts[key + np.uint64(1)])):
                other = np.uint64(holders[np.uint64(j)])
                met += last_met[other] != mine
                last_met[other] = mine
            visits -= starts[key + np.uint64(1)] - starts[key]
        most = max(most, met)
        at += 1
    return most, at
