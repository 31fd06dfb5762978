"""An observer that stops a simulated training when the mean time of a step is known well enough."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from typing_extensions import override

from manyhands.engines.base import Observer
from manyhands.events import Event
from manyhands.evidence.calibrate.observe import LEAST_BLOCK, WARM

ENOUGH = 0.02  # the relative standard error of the mean at which training stops
LEAST_BLOCKS = 2
LEAST_WORKER_STEPS = 512  # to measure, of all workers together
MOST_WORKER_STEPS = 65_536  # to simulate, of all workers together
MOST_STEPS = 2_048
EPOCHS_WITHIN = 16_384  # if three epochs take at most this many worker-steps, blocks are whole epochs


class Mark(NamedTuple):
    """Sums over all workers at the end of a global batch."""

    time_s: float
    compute_s: float
    exchange_s: float
    rows: int
    bytes: int
    pushes: int


@dataclass(frozen=True, kw_only=True)
class SteadyStep:
    """The mean of the measured steps (global batches), in virtual time."""

    steps: int  # measured
    step_s: float
    spread: float  # the relative standard error of `step_s`
    rows: float  # used in a step
    compute: float  # share of a worker's time, as `exchange`
    exchange: float
    bytes: float  # sent by a worker in a step
    staleness: float | None  # median over pushes; None without any
    rounds: int  # exchanges of worker 0 from the start
    simulated: int  # steps from the start

    @property
    def wait(self) -> float:
        """Share of a worker's time: for other workers, for rows."""
        return max(0.0, 1 - self.compute - self.exchange)


class SteadyObserver(Observer):
    """Measures the steps of a training in blocks: whole rounds of exchange, or whole epochs if they are short.

    Training stops when the relative error of the blocks' mean is below ENOUGH or, with `steps`, after that many steps;
    at the latest after MOST_WORKER_STEPS. As in a calibration, the first steps are not measured.
    """

    def __init__(self, workers: int, ticks_per_epoch: int | None, steps: int | None = None) -> None:
        self._workers, self._steps = workers, steps
        long = ticks_per_epoch is None or 3 * ticks_per_epoch * workers > EPOCHS_WITHIN
        fits = steps is None or ticks_per_epoch is None or steps >= ticks_per_epoch
        self._epoch = None if long or not fits else ticks_per_epoch  # steps of a block, where it is a whole epoch
        self._first = WARM if self._epoch is None else -(-WARM // self._epoch) * self._epoch
        most = min(MOST_STEPS, max(1, MOST_WORKER_STEPS // workers))
        self._most = most if steps is None else self._first + steps
        self._least = max(LEAST_BLOCK, -(-LEAST_WORKER_STEPS // workers))
        self._marks: list[Mark] = []
        self._sums = [0.0, 0.0, 0, 0]  # compute_s, exchange_s, rows, bytes
        self._events = 0
        self._staleness: list[int] = []  # of each push
        self._own = 0  # ticks of worker 0
        self._rounds: list[int] = []  # the ticks of worker 0 that exchanged
        self._reason = ""

    @override
    def stopping(self) -> str:
        return self._reason

    @override
    def event(self, event: Event) -> None:
        if event.type != "step" or self._reason:
            return
        values = event.values
        self._events += 1
        added = values["compute_s"], values["exchange_s"], values["rows"] - values["unused"], values["bytes"]
        self._sums = [total + value for total, value in zip(self._sums, added, strict=True)]
        self._staleness += values.get("staleness", ())
        if event.rank == 0:
            self._own += 1
            if values["round"]:
                self._rounds.append(self._own)
        if self._events % self._workers == 0:
            compute_s, exchange_s, rows, bytes = self._sums
            self._marks.append(Mark(event.time_s, compute_s, exchange_s, int(rows), int(bytes), len(self._staleness)))
            if self._is_enough():
                self._reason = "steady"

    @property
    def steps(self) -> int:
        """Simulated so far."""
        return len(self._marks)

    @property
    def _block(self) -> int:
        """Steps of a block; 0 while unknown."""
        if self._epoch is not None:
            return self._epoch
        gaps = [later - earlier for earlier, later in pairwise(self._rounds)]
        if gaps:
            return max(1, round(statistics.median(gaps)))
        return LEAST_BLOCK if not self._rounds and len(self._marks) >= self._most else 0

    def _ends(self) -> list[int]:
        """Indices of the marks at which blocks begin and end."""
        block = self._block
        return list(range(self._first - 1, len(self._marks), block)) if block else []

    def _is_enough(self) -> bool:
        if len(self._marks) >= self._most:
            return True
        ends = self._ends()
        if self._steps is not None or len(ends) <= LEAST_BLOCKS or ends[-1] - ends[0] < self._least:
            return False
        return _standard_error(self._seconds(ends)) < ENOUGH

    def _seconds(self, ends: list[int]) -> list[float]:
        """Seconds a step, of each block."""
        times = [self._marks[end].time_s for end in ends]
        return [(later - earlier) / self._block for earlier, later in pairwise(times)]

    def measured(self) -> SteadyStep | None:
        """None before the end of the first block."""
        ends = self._ends()
        if len(ends) < 2:
            return None
        first, last, steps = self._marks[ends[0]], self._marks[ends[-1]], ends[-1] - ends[0]
        elapsed_s, worker_steps = last.time_s - first.time_s, steps * self._workers
        stale = self._staleness[first.pushes : last.pushes]
        return SteadyStep(
            steps=steps,
            step_s=elapsed_s / steps,
            spread=_standard_error(self._seconds(ends)),
            rows=(last.rows - first.rows) / steps,
            compute=(last.compute_s - first.compute_s) / (elapsed_s * self._workers),
            exchange=(last.exchange_s - first.exchange_s) / (elapsed_s * self._workers),
            bytes=(last.bytes - first.bytes) / worker_steps,
            staleness=float(statistics.median(stale)) if stale else None,
            rounds=len(self._rounds),
            simulated=len(self._marks),
        )


def _standard_error(samples: list[float]) -> float:
    """The relative standard error of the mean; 0 of a single sample."""
    if len(samples) < 2:
        return 0.0
    return statistics.stdev(samples) / math.sqrt(len(samples)) / statistics.fmean(samples)
