"""Estimates as text: a table for each number of workers, and the rule of its error bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import StringIO

from rich.console import Console
from rich.table import Table

from manyhands import units
from manyhands.engines.sim.profile import Profile
from manyhands.evidence.estimate.bars import FLOOR
from manyhands.evidence.estimate.estimate import Estimate, Estimates, Span

WIDTH = 160  # a narrower terminal breaks the lines
_COLUMNS = (
    "strategy",
    "a step",
    "rows/s",
    "speed-up",
    "efficiency",
    "training",
    "sent a step",
    "in all",
    "compute",
    "exchange",
    "wait",
    "stale",
)
_NOT_TRIED = "*"


def text(found: Estimates) -> str:
    """A block of plain text."""
    console = Console(file=StringIO(), width=WIDTH, color_system=None, highlight=False, markup=False)
    for line in _head(found):
        console.print(line, soft_wrap=True)
    for workers in dict.fromkeys(one.workers for one in found.estimates):
        console.print()
        _print(console, workers, [one for one in found.estimates if one.workers == workers])
    console.print()
    for line in _foot(found):
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _head(found: Estimates) -> list[str]:
    rows = "a stream" if found.rows is None else f"{found.rows:,} rows an epoch"
    return [
        f"{found.task}: {found.parameters:,} parameters, {rows}; "
        f"one worker of the profile makes {units.short(found.solo_rows_per_s)} rows/s",
        f"network {found.network}; compute {found.compute}",
    ]


def _print(console: Console, workers: int, estimates: list[Estimate]) -> None:
    predicted = [one for one in estimates if not one.refused]
    sizes = {one.batch_size for one in predicted}
    of = f", {sizes.pop():,} rows a step" if len(sizes) == 1 else ""
    console.print(units.count(workers, "worker") + of, soft_wrap=True)
    if predicted:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("strategy", "training") else "right", no_wrap=True)
        for one in predicted:
            table.add_row(*_cells(one))
        console.print(table)
    notes: dict[str, list[str]] = {}
    for one in estimates:
        for line in [one.refused] if one.refused else one.notes:
            notes.setdefault(line, []).append(one.strategy)
    for line, strategies in notes.items():
        whose = "all" if len(strategies) == len(estimates) > 1 else ", ".join(strategies)
        console.print(f"  {whose}: {line}", soft_wrap=True)


def _cells(one: Estimate) -> list[str]:
    assert one.step is not None
    mark = _NOT_TRIED if one.bars is not None and not one.bars.tried else ""
    return [
        f"{one.strategy}{mark}",
        units.duration(one.step.seconds),
        _or_dash(one.rows_per_s, units.short),
        _or_dash(one.speed_up, units.short),
        _or_dash(one.efficiency, _percent),
        "-" if one.training is None else _span(one.training),
        _or_dash(one.bytes_per_step, units.size),
        _or_dash(one.bytes_in_training, units.size),
        *(_or_dash(share, _percent) for share in (one.compute, one.exchange, one.wait)),
        _or_dash(one.staleness, units.number),
    ]


def _foot(found: Estimates) -> list[str]:
    lines = [
        "rows/s, speed-up and efficiency: against one worker of the same profile. sent: by a worker. "
        "compute, exchange, wait: of a worker's time. stale: median of pushes, in versions. "
        "training: without start, validation and checkpoints."
    ]
    return [*lines, *_rule(found.profile, found.estimates), *found.notes]


def _rule(profile: Profile, estimates: Iterable[Estimate]) -> list[str]:
    if not profile.errors:
        return []
    tried = ", ".join(f"{name} {error:+.1%}" for name, error in profile.errors.items())
    line = (
        f"low to high: on {profile.workers} workers calibration's own predictions were off by {tried} in the run that "
        f"differs most. By that factor, at least {FLOOR:.0%}, and by it again for each doubling of workers, or of rows, "
        "away from what was measured."
    )
    if any(one.bars is not None and not one.bars.tried for one in estimates):
        line += (
            f" {_NOT_TRIED} was not tried there: extrapolated from the largest error, and the part of its step that is "
            "not computing may take half as long or twice."
        )
    return [line]


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def _span(span: Span) -> str:
    if span.low is None or span.high is None:
        return units.duration(span.seconds)
    return f"{units.duration(span.seconds)} ({units.duration(span.low)} to {units.duration(span.high)})"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 or share == 0 else f"{share:.1%}"
