"""A comparison as text for terminals: what was measured, what it cost, and what follows from it. Pure."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from manyhands import units
from manyhands.evidence.compare import means, measures
from manyhands.evidence.compare.comparison import Comparison, Trial
from manyhands.evidence.compare.significance import HIGHER, Mean, mean
from manyhands.recording.history import PARTS
from manyhands.server.staleness import quantile

WIDTH, NARROWEST = 120, 80
SIGNS = {"better": "+", "worse": "-", "same": "=", "unclear": "~"}
LEGEND = "+ better, - worse than {base}; = the same within the margin; ~ no difference seen"
_GAP = 2


@dataclass(frozen=True)
class _Column:
    """A column; the highest `spare` is the first to be left out where there is no room."""

    title: str
    cells: list[str]
    spare: int = 0

    @property
    def width(self) -> int:
        return max(map(len, [*self.title.split("\n"), *self.cells]))


def text(comparison: Comparison, width: int = WIDTH) -> str:
    """Two tables, the verdict and the first advice, `width` columns at most; columns are dropped, not cut."""
    width = max(NARROWEST, min(width, WIDTH))
    legend = LEGEND.format(base=comparison.reference.replace(", ", " with "))
    parts = [
        _headline(comparison),
        "",
        _drawn(_results(comparison), width),
        f"  {legend}; {_taken_over(comparison)}",
        "",
        _drawn(_costs(comparison), width),
        "",
        *(f"{name} failed: {why}" for name, why in _failures(comparison)),
        comparison.verdict,
        *(f"Advice: {one.text}" for one in comparison.advice[:1]),
    ]
    return "\n".join(line for part in parts for line in _wrapped(part, width))


def _taken_over(comparison: Comparison) -> str:
    return f"{'mean ± half the range of ' if comparison.repeats > 1 else ''}{_repeats(comparison)}"


def _headline(comparison: Comparison) -> str:
    machine = comparison.machine
    place = (
        f"engine {machine.get('engine', 'local')}, {machine.get('device', 'cpu')}, {machine.get('cores', '?')} cores"
    )
    simulated = "; all seconds are virtual" if comparison.simulated else ""
    ended = "" if comparison.complete else ", interrupted"
    return (
        f"{comparison.task}: {len(comparison.variants)} variants, {_repeats(comparison)}{ended} in {_seconds(comparison.seconds)} "
        f"({place}{simulated})"
    )


def _repeats(comparison: Comparison) -> str:
    return "1 repeat" if comparison.repeats == 1 else f"{comparison.repeats} repeats"


def _failures(comparison: Comparison) -> list[tuple[str, str]]:
    found = [(variant.name, comparison.failure(variant.name)) for variant in comparison.variants]
    return [(name, why) for name, why in found if why]


# -- tables ----------------------------------------------------------------------------------------------------------


def _results(comparison: Comparison) -> list[_Column]:
    names = [variant.name for variant in comparison.variants]
    speeds = [measures.speed_up(comparison, name) for name in names]
    several = len(measures.solos(comparison)) > 1
    all_threads = comparison.variant(comparison.reference).threads
    columns = [
        _Column("variant", names),
        _Column("rows/s", [_spread(_of(comparison, name, "rows_per_s")) for name in names]),
        _Column(
            f"against\n{all_threads} threads" if several else "against\nsolo",
            _times([one.all_threads for one in speeds]),
        ),
        *([_Column("against\n1 thread", _times([one.one_thread for one in speeds]), spare=2)] if several else []),
        _Column("effi-\nciency", [_percent(one.efficiency) for one in speeds], spare=4),
    ]
    if comparison.target is not None:
        columns.append(
            _Column("seconds to\ntarget", [_to_target(comparison, name, "target_seconds") for name in names])
        )
        columns.append(
            _Column("rows to\ntarget", [_to_target(comparison, name, "target_rows") for name in names], spare=3)
        )
    return [
        *columns,
        _Column(comparison.metric.replace("_", "\n", 1), [_metric(comparison, name) for name in names]),
        _Column("distance\nfrom solo", [_number(_middle(comparison.of(name), "distance")) for name in names], spare=5),
        _Column("same\nanswers", [_percent(_middle(comparison.of(name), "agreement"), 1) for name in names], spare=6),
    ]


def _costs(comparison: Comparison) -> list[_Column]:
    trials = {variant.name: comparison.of(variant.name) for variant in comparison.variants}
    columns = [
        _Column("variant", list(trials)),
        _Column("worker\nseconds", [_number(_middle(found, "worker_seconds")) for found in trials.values()]),
        *(_Column(part, [_share(found, part) for found in trials.values()], spare=3) for part in PARTS),
        _Column("sent", [_bytes(_middle(found, "bytes")) for found in trials.values()]),
        _Column("staleness\nmedian", [_staleness(comparison, name) for name in trials], spare=4),
        _Column("memory\na worker", [_memory(found) for found in trials.values()]),
    ]
    return [column for column in columns if any(column.cells)]


def _drawn(columns: Sequence[_Column], width: int) -> str:
    """The columns that there is room for; the first is folded where even those that must stay are too wide."""
    kept = list(columns)
    while sum(column.width + _GAP for column in kept) > width and any(column.spare for column in kept):
        kept.remove(max(kept, key=lambda column: column.spare))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    for i, column in enumerate(kept):
        table.add_column(column.title, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def _wrapped(part: str, width: int) -> list[str]:
    """A paragraph in lines; a table's lines stay as they are."""
    lines = part.split("\n")
    if len(lines) > 1 or len(part) <= width:
        return lines
    return textwrap.wrap(part, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# -- cells -----------------------------------------------------------------------------------------------------------


def _of(comparison: Comparison, name: str, what: str) -> Mean | None:
    return mean(measures.numbers(comparison, name, what), geometric=what in HIGHER)


def _middle(trials: Sequence[Trial], field: str) -> float | None:
    found = mean((getattr(trial, field) for trial in trials), geometric=field == "worker_seconds")
    return None if found is None else found.middle


def _spread(found: Mean | None) -> str:
    """`1,234 ±3 %`: the mean, and half of what lies between least and largest; of a single repeat the number alone."""
    if found is None:
        return "failed"
    if found.low == found.high or not found.middle:
        return _number(found.middle)
    return f"{_number(found.middle)} ±{50 * (found.high - found.low) / found.middle:.0f} %"


def _times(values: Sequence[float | None]) -> list[str]:
    return ["" if value is None else f"{value:.2f}x" if value < 100 else f"{value:,.0f}x" for value in values]


def _percent(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _to_target(comparison: Comparison, name: str, what: str) -> str:
    """The mean of the repeats that reached it; with the seconds, how many did not."""
    trials = comparison.of(name)
    found = mean((getattr(trial, what) for trial in trials), geometric=what in HIGHER)
    if not trials:
        return ""
    if found is None:
        return "never"
    missed = sum(getattr(trial, what) is None for trial in trials) if what == "target_seconds" else 0
    return _number(found.middle) + (f" ({missed} never)" if missed else _sign(comparison, name, what))


def _metric(comparison: Comparison, name: str) -> str:
    found = _of(comparison, name, comparison.metric)
    return "" if found is None else f"{found.middle:.4g}{_sign(comparison, name, comparison.metric)}"


def _sign(comparison: Comparison, name: str, of: str) -> str:
    found = comparison.difference(name, of)
    return "  " if found is None else f" {SIGNS[found.outcome]}"


def _share(trials: Sequence[Trial], part: str) -> str:
    """Of a worker's time."""
    spent = sum(one[part] for trial in trials for one in trial.timing)
    total = sum(value for trial in trials for one in trial.timing for value in one.values())
    return f"{100 * spent / total:.0f} %" if total else ""


def _staleness(comparison: Comparison, name: str) -> str:
    """The median of the pushes of all repeats."""
    pushes = means.staleness(comparison, name)
    return f"{quantile(pushes, 0.5)}" if pushes else ""


def _memory(trials: Sequence[Trial]) -> str:
    """Of the worker that needs most."""
    found = mean(max(trial.memory) for trial in trials if trial.memory)
    return "" if found is None else _bytes(found.middle)


def _number(value: float | None) -> str:
    return "" if value is None else units.short(value)


def _bytes(value: float | None) -> str:
    if not value:
        return ""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:.0f} B"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.1f} min"
