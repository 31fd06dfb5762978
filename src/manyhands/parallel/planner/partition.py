"""Where to cut a chain of units so that the slowest stage is as fast as it can be. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

CostOf = Callable[[int, int, int], float]
"""(first unit, the one after the last, stage): what a stage of these units costs; infinite where it does not fit."""


@dataclass(frozen=True)
class Partition:
    """The best cuts of a chain, and the cost of its slowest stage; infinite where no cuts fit."""

    cost: float
    starts: tuple[int, ...]  # of each stage but the first: its first unit


def sums(
    costs: Sequence[float],
    *,
    memory: Sequence[float] | None = None,
    caps: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> CostOf:
    """A stage costs the sum of its units.

    memory: of each unit.
    caps: of each stage. The sum of its units' memory may not exceed it.
    speeds: of each stage's worker. A stage's cost is divided by it.
    """
    cost_before, memory_before = [0.0, *accumulate(costs)], [0.0, *accumulate(memory or [0.0] * len(costs))]

    def cost_of(start: int, stop: int, stage: int) -> float:
        if caps is not None and memory_before[stop] - memory_before[start] > caps[stage]:
            return math.inf
        return (cost_before[stop] - cost_before[start]) / (1.0 if speeds is None else speeds[stage])

    return cost_of


def partition(units: int, stages: int, cost_of: CostOf) -> Partition:
    """Cut a chain of units into so many stages, none empty: the greatest cost of a stage is least.

    Dynamic programming over the last cut: O(stages · units²).
    """
    best = [[math.inf] * (units + 1) for _ in range(stages + 1)]  # [stages][units]: of the first so many
    last = [[0] * (units + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(stages):
        for stop in range(stage + 1, units + 1):
            for start in range(stage, stop):
                found = max(best[stage][start], cost_of(start, stop, stage))
                if found < best[stage + 1][stop]:
                    best[stage + 1][stop], last[stage + 1][stop] = found, start
    starts, stop = list[int](), units
    for stage in range(stages, 0, -1):
        stop = last[stage][stop]
        starts.append(stop)
    return Partition(best[stages][units], tuple(reversed(starts[:-1])))
