"""When the mean of a step is known well enough: an observer of a simulated training that stops it then."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from typing_extensions import override

from manyhands.calibrating.observe import LEAST_BLOCK, WARM
from manyhands.engines.base import Observer
from manyhands.events import Event
from manyhands.history import PARTS

ENOUGH = 0.02  # standard error of the mean, as a share of it
LEAST_BLOCKS = 2
LEAST_WORKER_STEPS = 512  # that are looked at, of all workers together
MOST_WORKER_STEPS = 16_384  # that are simulated, of all workers together, where these show whole rounds
UTMOST_WORKER_STEPS = 65_536  # and where they do not
MOST_STEPS = 2_048
EPOCHS_WITHIN = 6_144  # worker-steps of two epochs, up to which means are of whole epochs


class Mark(NamedTuple):
    """Sums over all workers at the start, and whenever another global batch was done."""

    time_s: float
    said_s: float  # all that workers say of their time
    compute_s: float
    exchange_s: float
    rows: int
    bytes: int
    pushes: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of the steps that were looked at: global batches, in virtual time."""

    steps: int
    step_s: float  # seconds a step
    spread: float  # standard error of that, as a share of it
    rows: float  # that a step used
    compute: float  # share of a worker's time
    exchange: float
    bytes: float  # that a worker sent in a step
    staleness: float | None  # median over pushes; None without any
    rounds: int  # exchanges that worker 0 made, from the start
    simulated: int  # steps from the start

    @property
    def wait(self) -> float:
        """Share of a worker's time: for other workers, for rows."""
        return max(0.0, 1 - self.compute - self.exchange)


class Steady(Observer):
    """Looks at the steps of a training in blocks: whole rounds of exchange, or, where epochs are short, whole epochs.

    The training is stopped as soon as the blocks' mean is known to ENOUGH, or after MOST_WORKER_STEPS; with `steps`, when so
    many have been seen. As in a calibration, the first steps are not looked at; but the first epoch is as any other.
    """

    def __init__(self, workers: int, ticks_per_epoch: int | None, steps: int | None = None) -> None:
        self._workers, self._steps = workers, steps
        self._epoch = ticks_per_epoch if _is_short(ticks_per_epoch, workers, steps) else None
        self._first = WARM if self._epoch is None else 0  # steps that are not looked at
        self._most, self._utmost = (
            min(MOST_STEPS, -(-worker_steps // workers)) if steps is None else self._first + steps
            for worker_steps in (MOST_WORKER_STEPS, UTMOST_WORKER_STEPS)
        )
        self._least = max(LEAST_BLOCK, -(-LEAST_WORKER_STEPS // workers))
        self._marks: list[Mark] = []
        self._sums = [0.0, 0.0, 0.0, 0, 0]  # as in a mark
        self._turns = 0
        self._staleness: list[int] = []  # of each push
        self._own = 0  # ticks of worker 0
        self._rounds: list[int] = []  # those of them that exchanged
        self._reason = ""

    @override
    def stopping(self) -> str:
        return self._reason

    @override
    def event(self, event: Event) -> None:
        """What a worker says of a tick, at the end of its next one."""
        if event.type != "step" or self._reason:
            return
        values = event.values
        said_s = sum(values[f"{part}_s"] for part in PARTS)
        used = values["rows"] - values["unused"]
        seen = said_s, values["compute_s"], values["exchange_s"], used, values["bytes"]
        self._sums = [total + value for total, value in zip(self._sums, seen, strict=True)]
        self._staleness += values.get("staleness", ())
        if event.rank == 0:
            self._own += 1
            if values["round"]:
                self._rounds.append(self._own)

    def turned(self, since: float, now: float) -> None:
        """A worker has made a tick. Ticks of all workers together make a global batch, whoever made how many."""
        if self._reason:
            return
        if not self._marks:
            self._mark(since)
        self._turns += 1
        if self._turns % self._workers == 0:
            self._mark(now)
            if self._is_enough():
                self._reason = "steady"

    def _mark(self, now: float) -> None:
        said_s, compute_s, exchange_s, rows, bytes = self._sums
        self._marks.append(Mark(now, said_s, compute_s, exchange_s, int(rows), int(bytes), len(self._staleness)))

    @property
    def seen(self) -> int:
        """Steps so far."""
        return max(0, len(self._marks) - 1)

    # -- blocks ------------------------------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        """Steps of one; 0 while nobody knows."""
        if self._epoch is not None:
            return self._epoch
        gaps = [later - earlier for earlier, later in pairwise(self._rounds)]
        if gaps:
            return max(1, round(statistics.median(gaps)))
        return LEAST_BLOCK if not self._rounds and self.seen >= self._utmost else 0

    def _ends(self) -> list[int]:
        """The marks at which blocks begin and end."""
        block = self._block
        return list(range(self._first, len(self._marks), block)) if block else []

    def _is_enough(self) -> bool:
        ends = self._ends()
        if self.seen >= self._utmost:
            return True
        if len(ends) <= LEAST_BLOCKS:
            return False
        if self.seen >= self._most:
            return True
        looked_at = ends[-1] - ends[0]
        return self._steps is None and looked_at >= self._least and _spread(self._seconds(ends)) < ENOUGH

    def _seconds(self, ends: list[int]) -> list[float]:
        """Seconds a step, of each block."""
        times = [self._marks[end].time_s for end in ends]
        return [(later - earlier) / self._block for earlier, later in pairwise(times)]

    def measured(self) -> Measured | None:
        """None where not one whole block was seen."""
        ends = self._ends()
        if len(ends) < 2:
            return None
        first, last, steps = self._marks[ends[0]], self._marks[ends[-1]], ends[-1] - ends[0]
        elapsed_s = last.time_s - first.time_s
        workers_s = max(
            elapsed_s * self._workers, last.said_s - first.said_s
        )  # where an epoch ends, some is said earlier
        stale = self._staleness[first.pushes : last.pushes]
        return Measured(
            steps=steps,
            step_s=elapsed_s / steps,
            spread=_spread(self._seconds(ends)),
            rows=(last.rows - first.rows) / steps,
            compute=(last.compute_s - first.compute_s) / workers_s,
            exchange=(last.exchange_s - first.exchange_s) / workers_s,
            bytes=(last.bytes - first.bytes) / (steps * self._workers),
            staleness=float(statistics.median(stale)) if stale else None,
            rounds=len(self._rounds),
            simulated=self.seen,
        )


def _is_short(ticks_per_epoch: int | None, workers: int, steps: int | None) -> bool:
    """Whether a mean can be of whole epochs."""
    if ticks_per_epoch is None or (steps is not None and steps < ticks_per_epoch):
        return False
    return 2 * ticks_per_epoch * workers <= EPOCHS_WITHIN


def _spread(samples: list[float]) -> float:
    """The standard error of their mean, as a share of it; 0 of a single one."""
    if len(samples) < 2:
        return 0.0
    return statistics.stdev(samples) / math.sqrt(len(samples)) / statistics.fmean(samples)
