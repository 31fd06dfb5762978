"""What grows with the rows of a micro-batch: a fixed part, and so much a row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearCost:
    """fixed + slope · x; nothing of it is negative."""

    fixed: float = 0.0
    slope: float = 0.0

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x

    def __add__(self, other: LinearCost) -> LinearCost:
        return LinearCost(self.fixed + other.fixed, self.slope + other.slope)

    @staticmethod
    def of_medians(xs: Sequence[int], once: Callable[[int], float], repeats: int = 9) -> LinearCost:
        """Through the medians of what `once` gives at each x, so many times."""
        return LinearCost.through(xs, [statistics.median(once(x) for _ in range(repeats)) for x in xs])

    @staticmethod
    def through(xs: Sequence[float], ys: Sequence[float]) -> LinearCost:
        """Through one or two points, x rising. What falls is taken as flat, and what rises faster than x as without a fixed
        part; both then go through the last point."""
        if len(xs) == 1:
            return LinearCost(0.0, ys[0] / xs[0])
        slope = (ys[1] - ys[0]) / (xs[1] - xs[0])
        fixed = ys[1] - slope * xs[1]
        if slope < 0:
            return LinearCost(ys[1], 0.0)
        return LinearCost(fixed, slope) if fixed >= 0 else LinearCost(0.0, ys[1] / xs[1])
