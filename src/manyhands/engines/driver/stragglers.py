"""Which worker is slower than the others, from the steps that all report. Pure: no clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.units import short

WINDOW = 20
"""Over so many steps of each worker it is judged."""
NAMED_AT = 3.0
"""A worker so many times slower than the others is named."""
LEAST_S = 0.01
"""A difference of less, in a step, is nobody's concern: it may be the machine's other work."""


@dataclass(frozen=True)
class Straggler:
    """A worker, its seconds a step (the median), and the median of those of the others."""

    worker_id: int
    seconds: float
    others_s: float

    @property
    def factor(self) -> float:
        return self.seconds / self.others_s if self.others_s > 0 else math.inf

    def __str__(self) -> str:
        """`4.1 times as long for a step as the others: 820 ms, against 200 ms`"""
        own, others = short(1000 * self.seconds), short(1000 * self.others_s)
        return f"{self.factor:.1f} times as long for a step as the others: {own} ms, against {others} ms"


@dataclass
class Stragglers:
    """What counts of a step is a worker's own time: waiting for rows, forward, backward and optimizer. In a step all wait
    for the slowest, so that the time of the whole step is everybody's."""

    _generation: int = field(default=0, init=False)
    _seconds: dict[int, list[float]] = field(default_factory=dict, init=False)  # by worker id, since the last judgement

    def step(self, worker_id: int, generation: int, values: dict[str, Any]) -> None:
        """A worker's event `step`; the values of another host may be anything."""
        own = [values.get(name) for name in ("input_s", "compute_s")]
        if not all(isinstance(part, int | float) and math.isfinite(part) for part in own) or not values.get("rows"):
            return
        if generation > self._generation:  # others share the rows by now
            self._generation = generation
            self._seconds.clear()
        if generation == self._generation:
            self._seconds.setdefault(worker_id, []).append(sum(own))  # type: ignore[arg-type]

    def judge(self, members: Sequence[int]) -> Straggler | None:
        """The slowest of the members, once all have reported `WINDOW` steps more; then the next ones are counted."""
        if len(members) < 2 or any(len(self._seconds.get(one, ())) < WINDOW for one in members):
            return None
        medians = {one: statistics.median(self._seconds[one]) for one in members}
        self._seconds.clear()
        slowest = max(medians, key=lambda one: medians[one])
        others_s = statistics.median(seconds for one, seconds in medians.items() if one != slowest)
        return Straggler(slowest, medians[slowest], others_s) if medians[slowest] - others_s >= LEAST_S else None
