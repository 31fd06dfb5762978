"""Where to cut a chain of units so that the slowest stage is as fast as it can be. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """The best cuts of a chain, and the cost of its slowest stage; infinite where no cuts fit."""

    cost: float
    starts: tuple[int, ...]  # of each stage but the first: its first unit


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    memory: Sequence[float] | None = None,
    caps: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> Partition:
    """Cut units of these costs into so many stages, none empty: the greatest cost of a stage is least.

    memory: of each unit.
    caps: of each stage. The sum of its units' memory may not exceed it.
    speeds: of each stage's worker. A stage's cost is divided by it.

    Dynamic programming over the last cut: O(stages · units²).
    """
    units = len(costs)
    memory = [0.0] * units if memory is None else memory
    caps = [math.inf] * stages if caps is None else caps
    speeds = [1.0] * stages if speeds is None else speeds
    cost_before, memory_before = [0.0, *accumulate(costs)], [0.0, *accumulate(memory)]

    def cost(start: int, stop: int, stage: int) -> float:
        fits = memory_before[stop] - memory_before[start] <= caps[stage]
        return (cost_before[stop] - cost_before[start]) / speeds[stage] if fits else math.inf

    best = [[math.inf] * (units + 1) for _ in range(stages + 1)]  # [stages][units]: of the first so many
    last = [[0] * (units + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(stages):
        for stop in range(stage + 1, units + 1):
            for start in range(stage, stop):
                found = max(best[stage][start], cost(start, stop, stage))
                if found < best[stage + 1][stop]:
                    best[stage + 1][stop], last[stage + 1][stop] = found, start
    starts, stop = list[int](), units
    for stage in range(stages, 0, -1):
        stop = last[stage][stop]
        starts.append(stop)
    return Partition(best[stages][units], tuple(reversed(starts[:-1])))
