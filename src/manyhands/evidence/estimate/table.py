"""Estimates as text: a table for each number of workers with its error bars; an executor's memory with its settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable

from manyhands import units
from manyhands.engines.sim.profile import Profile
from manyhands.evidence.estimate.bars import FLOOR
from manyhands.evidence.estimate.estimate import Estimate, Estimates, Span
from manyhands.evidence.estimate.executor_memory import ExecutorMemory
from manyhands.evidence.text_table import text_table, text_tables

WIDTH, NARROWEST = 160, 60
_NOT_TRIED = "*"


def text(found: Estimates, width: int = WIDTH) -> str:
    """A block of plain text, `width` columns at most: a table that is wider is cut into several."""
    width = max(NARROWEST, min(width, WIDTH))
    rows = "a stream" if found.rows is None else f"{units.count(found.rows, 'row')} an epoch"
    lines = [
        f"{found.task}: {units.count(found.parameters, 'parameter')}, {rows}; "
        f"one worker of the profile makes {units.short(found.solo_rows_per_s)} rows/s",
        f"network {_short(found.network)}",
        f"compute {_short(found.compute)}",
    ]
    for workers in dict.fromkeys(one.workers for one in found.estimates):
        lines += ["", *_table(workers, [one for one in found.estimates if one.workers == workers], width)]
    lines += [
        "",
        "rows/s, speed-up and efficiency: against one worker of the same profile. sent: by a worker. "
        "compute, exchange, wait: of a worker's time. stale: median of pushes, in versions. "
        "training: without start, validation and checkpoints.",
    ]
    lines += [*_rule(found.profile, found.estimates), *found.notes]
    return "\n".join(part for line in lines for part in _wrapped(line, width))


def _short(spec: object) -> str:
    """Four digits of each number, and room to break the line."""
    return re.sub(r"\d+\.\d+(e[-+]?\d+)?", lambda found: f"{float(found[0]):.4g}", str(spec)).replace(",", ", ")


def _wrapped(line: str, width: int) -> list[str]:
    """A table stays as it is; so does an empty line."""
    if "\n" in line or not line:
        return [line]
    return textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False)


def _table(workers: int, estimates: list[Estimate], width: int) -> list[str]:
    rows = [_cells(one) for one in estimates if not one.refused]
    sizes = {one.batch_size for one in estimates if not one.refused}
    lines = [units.count(workers, "worker") + (f", {sizes.pop():,} rows a step" if len(sizes) == 1 else "")]
    if rows:
        lines.append(text_tables({name: [row[name] for row in rows] for name in rows[0]}, width))
    notes: dict[str, list[str]] = {}
    for one in estimates:
        for line in [one.refused] if one.refused else one.notes:
            notes.setdefault(line, []).append(one.strategy)
    for line, strategies in notes.items():
        whose = "all" if len(strategies) == len(estimates) > 1 else ", ".join(strategies)
        lines.append(f"  {whose}: {line}")
    return lines


def _cells(one: Estimate) -> dict[str, str]:
    """{title: text}"""
    assert one.step is not None
    mark = _NOT_TRIED if one.bars is not None and not one.bars.tried else ""
    return {
        "strategy": f"{one.strategy}{mark}",
        "a step": units.duration(one.step.seconds),
        "rows/s": _or_dash(one.rows_per_s, units.short),
        "speed-up": _or_dash(one.speed_up, units.short),
        "efficiency": _or_dash(one.efficiency, units.percent),
        "training": "-" if one.training is None else _span(one.training),
        "sent a step": _or_dash(one.bytes_per_step, units.size),
        "in all": _or_dash(one.bytes_in_training, units.size),
        "compute": _or_dash(one.compute, units.percent),
        "exchange": _or_dash(one.exchange, units.percent),
        "wait": _or_dash(one.wait, units.percent),
        "stale": _or_dash(one.staleness, units.number),
    }


def _rule(profile: Profile, estimates: Iterable[Estimate]) -> list[str]:
    if not profile.errors:
        return []
    tried = ", ".join(f"{name} {error:+.1%}" for name, error in profile.errors.items())
    line = (
        f"low to high: on {units.count(profile.workers, 'worker')} calibration's own predictions were off by {tried} "
        f"in the run that differs most. By that factor, at least {FLOOR:.0%}, and by it again for each doubling of "
        "workers, or of rows, away from what was measured."
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


def memory_text(found: ExecutorMemory, width: int = WIDTH) -> str:
    """A block of plain text, ready to paste from `spark-submit` on."""
    columns = {
        "part": [*(part.name for part in found.parts), "in all"],
        "one": [*(units.size(part.bytes) for part in found.parts), ""],
        "in an executor": [*(str(part.count) for part in found.parts), ""],
        "together": [*(units.size(part.total) for part in found.parts), f"{found.overhead_mb:,} MiB"],
        "": [*(part.how for part in found.parts), ""],
    }
    settings = [f"  --conf {name}={value}" for name, value in found.settings.items()]
    return "\n".join(
        [
            f"{found.task}: {found.strategy} on {units.count(found.workers, 'worker')}, "
            f"{found.workers_per_executor} in an executor; resident, of a worker: {units.size(found.worker_bytes)}",
            "",
            text_table(columns, width),
            "",
            " \\\n".join(["spark-submit", *settings]),
            "",
            "spark.executor.pyspark.memory and spark.memory.offHeap.size stay unset: the first limits the addresses of "
            "each Python process, of which shared memory takes many; the second is the JVM's.",
        ]
    )
