"""Cuts of a chain are those that brute force finds."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from manyhands.parallel.planner.partition import Partition, partition, sums


def brute_force(costs: list[float], stages: int, memory: list[float], caps: list[float], speeds: list[float]) -> float:
    best = math.inf
    for starts in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = [0, *starts, len(costs)]
        spans = list(itertools.pairwise(ends))
        if all(sum(memory[a:b]) <= cap for (a, b), cap in zip(spans, caps, strict=True)):
            best = min(best, max(sum(costs[a:b]) / speed for (a, b), speed in zip(spans, speeds, strict=True)))
    return best


@pytest.mark.parametrize(("stages", "cost"), [(1, 30), (2, 16), (3, 10), (4, 8)])
def test_a_chain_of_eight(stages: int, cost: float) -> None:
    found = partition(8, stages, sums([5, 3, 2, 4, 6, 2, 3, 5]))
    assert found.cost == cost
    assert len(found.starts) == stages - 1


@pytest.mark.parametrize("seed", range(20))
def test_random_chains_with_caps_and_unequal_workers(seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(100):
        units = draws.randint(2, 10)
        stages = draws.randint(1, min(4, units))
        costs, memory = ([draws.randint(1, 20) for _ in range(units)] for _ in range(2))
        caps, speeds = (
            [draws.randint(10, 80) for _ in range(stages)],
            [draws.choice([0.5, 1, 2]) for _ in range(stages)],
        )
        found = partition(units, stages, sums(costs, memory=memory, caps=caps, speeds=speeds))
        assert found.cost == brute_force(costs, stages, memory, caps, speeds)
        if math.isfinite(found.cost):
            ends = [0, *found.starts, units]
            spans = list(itertools.pairwise(ends))
            assert all(a < b for a, b in spans)
            assert all(sum(memory[a:b]) <= cap for (a, b), cap in zip(spans, caps, strict=True))
            assert max(sum(costs[a:b]) / speed for (a, b), speed in zip(spans, speeds, strict=True)) == found.cost


def test_what_does_not_fit() -> None:
    assert partition(3, 2, sums([1, 1, 1], memory=[5, 5, 5], caps=[6, 6])).cost == math.inf
    assert partition(2, 2, sums([1, 2])) == Partition(2, (1,))
    assert partition(2, 3, sums([1, 2])).cost == math.inf
