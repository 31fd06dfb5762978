"""The `step` events of all workers, put together: a row of numbers a tick, and the sums over a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from manyhands.events import Event

PARTS = ("input", "compute", "exchange", "wait")  # where a worker's time goes


class History:
    """Rows of a run, in the order in which its ticks became complete: reported by all `workers`."""

    def __init__(self, workers: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.compute_s: defaultdict[int, float] = defaultdict(float)  # by rank
        self._workers = workers
        self._open: defaultdict[int, list[Event]] = defaultdict(list)
        self._timing = dict.fromkeys(PARTS, 0.0)

    def add(self, event: Event) -> dict[str, Any] | None:
        """Take a worker's `step`; the tick's row if this was the last worker of it."""
        reports = self._open[event.tick]
        reports.append(event)
        return self._complete(event.tick) if len(reports) == self._workers else None

    def preload(self, steps: Iterable[Event]) -> None:
        """Take the steps of earlier launches, which may have had another number of workers."""
        for event in steps:
            self._open[event.tick].append(event)
        self.close()

    def close(self) -> list[dict[str, Any]]:
        """The rows of ticks that not all workers reported (they were stopped, or go at their own pace)."""
        return [self._complete(tick) for tick in sorted(self._open)]

    def timing(self) -> dict[str, float]:
        """{input, compute, exchange, wait}: seconds, the mean over workers."""
        return dict(self._timing)

    def _complete(self, tick: int) -> dict[str, Any]:
        reports = self._open.pop(tick)
        row = row_of(tick, reports)
        self.rows.append(row)
        for part in PARTS:
            self._timing[part] += row[f"{part}_s"]
        for report in reports:
            if report.rank is not None:
                self.compute_s[report.rank] += report.values["compute_s"]
        return row


def row_of(tick: int, reports: list[Event]) -> dict[str, Any]:
    """One row of `Run.history`: what the workers that made this tick reported of it (docs/events.md lists the columns)."""
    values = [report.values for report in reports]
    row: dict[str, Any] = {
        "step": max(report.step for report in reports),
        "tick": tick,
        "epoch": values[0]["epoch"],
        "loss": weighted_loss(values),
        "weight": sum(v["weight"] for v in values),
        "rows": sum(v["rows"] for v in values),
        "unused": sum(v["unused"] for v in values),
        "rate": values[0]["rate"],
        "seconds": max(report.time_s for report in reports),
    }
    row |= {f"{part}_s": sum(v[f"{part}_s"] for v in values) / len(values) for part in PARTS}
    return row | {"bytes": sum(v["bytes"] for v in values), "round": any(v["round"] for v in values)}


def weighted_loss(values: list[dict[str, Any]]) -> float | None:
    """The mean of the losses that count, by weight; None where nobody had rows. A NaN of any worker makes it NaN."""
    counted = [(v["loss"], v["weight"]) for v in values if v["loss"] is not None and v["weight"]]
    total = sum(weight for _, weight in counted)
    return sum(loss * (weight / total) for loss, weight in counted) if counted else None
