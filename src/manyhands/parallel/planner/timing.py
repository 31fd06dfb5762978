"""How long a step takes: the schedule, played on a clock on which those who compute share the cores. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.parallel.schedules import Schedule, actions


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Of the machine on which workers compute, and what it costs them that others do."""

    count: float = math.inf  # so many workers compute at full speed
    together: int = 1  # workers that computed at once while costs were measured
    alone: float = 1.0  # seconds of one that computes alone, where those of `together` are 1

    def rate(self, active: int) -> float:
        """Progress a second of each of so many workers, where costs are those that were measured."""
        share = min(1.0, max(0, active - 1) / (self.together - 1)) if self.together > 1 else 1.0
        return min(1.0, self.count / max(1, active)) / (self.alone + (1.0 - self.alone) * share)


def step_seconds(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    *,
    crossing: Sequence[float] | None = None,
    cores: Cores | None = None,
    replicas: int = 1,
) -> float:
    """From the first pass of a step to its last.

    forward, backward: seconds of a micro-batch on each stage. crossing: seconds between a stage and the next one, during
    which neither computes. replicas: make the same steps on the same cores.
    """
    stages, cores = len(forward), Cores() if cores is None else cores
    orders = [actions(schedule, stages, micro_batches, stage) for stage in range(stages)]
    between = [0.0] * (stages - 1) if crossing is None else list(crossing)
    done: dict[tuple[bool, int, int], float] = {}  # (forward, stage, micro-batch): when
    following, left, now = [0] * stages, dict[int, float](), 0.0

    def ready(stage: int) -> float:
        """When what its next pass needs is there; infinite where that is not known yet."""
        action = orders[stage][following[stage]]
        source = action.source(stage, stages)
        own = (True, stage, action.micro)
        if source is None:
            return 0.0 if action.forward else done.get(own, math.inf)
        at = done.get((action.forward, source, action.micro), math.inf)
        return at + between[min(stage, source)]

    while any(at < len(order) for at, order in zip(following, orders, strict=True)):
        waiting = {
            stage: ready(stage)
            for stage in range(stages)
            if stage not in left and following[stage] < len(orders[stage])
        }
        for stage, at in waiting.items():
            if at <= now:
                left[stage] = (forward if orders[stage][following[stage]].forward else backward)[stage]
        rate = cores.rate(len(left) * replicas)
        ends = [now + seconds / rate for seconds in left.values()]
        later = min([*ends, *(at for at in waiting.values() if at > now)])
        for stage in list(left):
            left[stage] -= (later - now) * rate
            if left[stage] <= 1e-12:
                action = orders[stage][following[stage]]
                done[action.forward, stage, action.micro] = later
                following[stage] += 1
                del left[stage]
        now = later
    return now
