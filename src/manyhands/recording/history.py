"""The `step` events of all workers, put together: a row of numbers a tick, and the sums over a run.

A tick is complete when all workers reported it. Where rows were leased, a tick is a global batch, made slice by slice
by whoever got a lease: it is complete when all its slices were reported, and ticks are complete in any order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from manyhands.events import Event

PARTS = ("input", "compute", "exchange", "wait")  # where a worker's time goes
_SUMS = ("weight", "rows", "unused", "bytes", "ticks", *(f"{part}_s" for part in PARTS))
MOST_ROWS = 1 << 15  # that are kept; a row takes about a kilobyte


class History:
    """Rows of a run, in the order in which its ticks became complete.

    Memory is bounded: `rows` holds at most MOST_ROWS of them. When there are more, neighbours become one row, whose
    column `ticks` says of how many ticks it is, and later rows are of as many.
    """

    def __init__(self, workers: int) -> None:
        """`workers`: how many report each tick, unless the reports say that it has another number of parts."""
        self.rows: list[dict[str, Any]] = []
        self.steps = 0  # global batches that are complete
        self.seconds = 0.0  # when the newest was
        self.consumed = 0  # rows of data
        self.highest_rate: float | None = None
        self._ticks_a_row = 1
        self._workers = workers
        self._open: defaultdict[int, list[Event]] = defaultdict(list)
        self._complete_below = 0  # all ticks before are complete,
        self._complete_beyond: set[int] = set()  # and of those from there on these are
        self._staleness: defaultdict[int, Counter[int]] = defaultdict(Counter)  # by rank: versions -> pushes
        self._gain: dict[int, float] = {}  # by rank
        self._rows_of: Counter[int] = Counter()  # by rank
        self._timing = dict.fromkeys(PARTS, 0.0)
        self._timing_of: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PARTS, 0.0))  # by rank

    def add(self, event: Event) -> dict[str, Any] | None:
        """Take a worker's `step`; the tick's row if this was the last report of it."""
        if not self._take(event):
            return None
        return self._complete(event.tick, self._workers) if self._missing(event.tick, self._workers) == 0 else None

    def preload(self, steps: Iterable[tuple[Event, int]]) -> None:
        """Take the steps of earlier launches, see `rows_of`.

        A global batch of which some slices are left stays open: this launch makes them.
        """
        for _ in self.rows_of(steps):
            pass

    def rows_of(self, steps: Iterable[tuple[Event, int]]) -> Iterator[dict[str, Any]]:
        """Take steps with the number of workers of their launch (0: unknown); a row for each complete step."""
        ranks, generation = set(), 0
        for event, workers in steps:
            if event.generation != generation:  # of a step before that no more reports will come, see `regroup`
                generation = event.generation
                yield from (self._complete(tick, 0) for tick in self._whole_or_without_leases())
            if event.type == "closing":
                self.note(event)
                continue
            if not self._take(event):
                continue
            ranks.add(event.rank)
            if workers and self._missing(event.tick, workers) == 0:
                yield self._complete(event.tick, workers)
        yield from (self._complete(tick, len(ranks)) for tick in self._whole_or_without_leases())

    def _whole_or_without_leases(self) -> list[int]:
        """Open ticks but those of which some slices are left."""
        reports = sorted(self._open.items())
        return [tick for tick, of in reports if "lease" not in of[0].values or self._missing(tick, 0) <= 0]

    def regroup(self, tick: int, workers: int) -> list[dict[str, Any]]:
        """Other members, so many, go on with this tick: the rows of those before it of which no more reports will come.

        What was reported of this tick and later ones is void: whoever made it is lost, and the others make it again.
        Where rows are leased, all reports are still to come.
        """
        self._workers = workers
        in_step = [open_tick for open_tick, reports in self._open.items() if "lease" not in reports[0].values]
        for void in [open_tick for open_tick in in_step if open_tick >= tick]:
            self.consumed -= sum(report.values["rows"] for report in self._open.pop(void))
        return [self._complete(before, workers) for before in sorted(in_step) if before < tick]

    def close(self) -> list[dict[str, Any]]:
        """The rows of ticks that not all workers reported (they were stopped, or go at their own pace)."""
        return [self._complete(tick, self._workers) for tick in sorted(self._open)]

    def timing(self) -> dict[str, float]:
        """{input, compute, exchange, wait}: seconds, the mean over workers."""
        return dict(self._timing)

    def timing_of_workers(self) -> list[dict[str, float]]:
        """The same of each worker, by rank."""
        ranks = range(max(self._timing_of, default=-1) + 1)
        return [dict(self._timing_of[rank]) for rank in ranks]

    def rows_of_workers(self) -> list[int]:
        """By worker, the rows of data that it reported."""
        return [self._rows_of[rank] for rank in range(max(self._rows_of, default=-1) + 1)]

    def staleness_of_workers(self) -> list[dict[int, int]]:
        """By rank, {versions: pushes}, the least stale first; empty where nobody pushed to a server."""
        ranks = range(max(self._staleness, default=-1) + 1)
        return [dict(sorted(self._staleness[rank].items())) for rank in ranks]

    def staleness(self) -> dict[int, int]:
        """The same of all workers together."""
        return dict(sorted(sum(self._staleness.values(), Counter()).items()))

    def gain(self) -> float | None:
        """The newest estimate of rate times largest curvature of a push, over workers; None without one."""
        return max(self._gain.values(), default=None)

    def _take(self, event: Event) -> bool:
        """Whether it counts. A slice that a lost worker may have reported already (`again`) takes that report's place."""
        self.note(event)
        if event.values.get("again"):
            if event.tick < self._complete_below or event.tick in self._complete_beyond:
                return False
            reports = self._open[event.tick]
            for report in [one for one in reports if one.values["lease"][:2] == event.values["lease"][:2]]:
                reports.remove(report)
                self.consumed -= report.values["rows"]
        self._open[event.tick].append(event)
        self.consumed += event.values["rows"]
        return True

    def note(self, event: Event) -> None:
        """What a worker's `step` or `closing` says of its pushes."""
        if event.rank is not None and "staleness" in event.values:
            self._staleness[event.rank].update(event.values["staleness"])
        if event.rank is not None and "gain" in event.values:
            self._gain[event.rank] = event.values["gain"]

    def _missing(self, tick: int, workers: int) -> int:
        """Reports of this tick that are still to come."""
        reports = self._open[tick]
        return int(reports[0].values.get("parts", workers)) - len(reports)

    def _complete(self, tick: int, workers: int) -> dict[str, Any]:
        reports = self._open.pop(tick)
        self._complete_beyond.add(tick)
        while self._complete_below in self._complete_beyond:
            self._complete_beyond.remove(self._complete_below)
            self._complete_below += 1
        self.steps += 1
        row = row_of(self.steps, tick, reports, workers)
        self.consumed += row["rows"] - sum(report.values["rows"] for report in reports)
        self._keep(row)
        for part in PARTS:
            self._timing[part] += row[f"{part}_s"]
        for report in reports:
            if report.rank is not None:
                self._rows_of[report.rank] += report.values["rows"]
                for part in PARTS:
                    self._timing_of[report.rank][part] += report.values[f"{part}_s"]
        return row

    def _keep(self, row: dict[str, Any]) -> None:
        self.seconds = max(self.seconds, row["seconds"])
        self.highest_rate = row["rate"] if self.highest_rate is None else max(self.highest_rate, row["rate"])
        if self.rows and self.rows[-1]["ticks"] < self._ticks_a_row:
            self.rows[-1] = merged(self.rows[-1], row)
        else:
            self.rows.append(row)
        if len(self.rows) > MOST_ROWS:
            last = [self.rows.pop()] if len(self.rows) % 2 else []
            self.rows[:] = [merged(*pair) for pair in zip(self.rows[::2], self.rows[1::2], strict=True)] + last
            self._ticks_a_row *= 2


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two rows as one: sums, the mean loss by weight, and where the second one ended."""
    row = second | {"loss": weighted_loss([first, second]), "round": first["round"] or second["round"]}
    row |= {name: max(first[name], second[name]) for name in ("tick", "epoch", "seconds")}
    return row | {name: first[name] + second[name] for name in _SUMS}


def row_of(step: int, tick: int, reports: list[Event], workers: int) -> dict[str, Any]:
    """Row `step` of `Run.history`: what the workers that made this step reported (docs/events.md lists the columns)."""
    values = [report.values for report in reports]
    sharing = workers if "lease" in values[0] else len(values)
    row: dict[str, Any] = {
        "step": step,
        "tick": tick,
        "epoch": values[0]["epoch"],
        "loss": weighted_loss(values),
        "weight": sum(v["weight"] for v in values),
        "rows": sum(v["rows"] for v in values),
        "unused": sum(v["unused"] for v in values),
        "rate": values[0]["rate"],
        "seconds": max(report.time_s for report in reports),
    }
    if "global_rows" in values[0]:  # a worker that is lost may have taken its own report with it
        row["rows"] = values[0]["global_rows"]
        if row["unused"] == sum(v["rows"] for v in values):
            row["unused"] = row["rows"] if row["unused"] else 0
    row |= {f"{part}_s": sum(v[f"{part}_s"] for v in values) / sharing for part in PARTS}
    return row | {"bytes": sum(v["bytes"] for v in values), "round": any(v["round"] for v in values), "ticks": 1}


def weighted_loss(values: list[dict[str, Any]]) -> float | None:
    """The mean of the losses that count, by weight; None where nobody had rows. A NaN of any worker makes it NaN."""
    counted = [(v["loss"], v["weight"]) for v in values if v["loss"] is not None and v["weight"]]
    total = sum(weight for _, weight in counted)
    return sum(loss * (weight / total) for loss, weight in counted) if counted else None
