"""What a comparison's trials say, as numbers: curves, time to target, speed-up, means. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.evidence.compare.comparison import Comparison, Difference, Point, Target, Trial, Variant
from manyhands.evidence.compare.significance import HIGHER, difference, mean
from manyhands.recording.history import PARTS

WARM_SHARE, WARM_LEAST = 0.05, 3  # first ticks that a rate leaves out: memory is taken, caches fill


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast as solo, by the means of rows a second. None where one of them lacks a repeat."""

    one_thread: float | None
    all_threads: float | None
    efficiency: float | None
    """Speed-up over one thread as a share of the ideal: of all threads, or of workers if solo has one variant."""


# -- one trial -------------------------------------------------------------------------------------------------------


def until(history: Sequence[Mapping[str, Any]]) -> Callable[[int], tuple[int, float]]:
    """tick -> (rows, seconds) of all ticks up to and with this one. history: rows of `Run.history`, in any order."""
    rows = sorted(history, key=lambda row: row["tick"])
    ticks = [row["tick"] for row in rows]
    consumed = list(itertools.accumulate((row["rows"] for row in rows), initial=0))
    seconds = list(itertools.accumulate(map(seconds_of, rows), initial=0.0))

    def at(tick: int) -> tuple[int, float]:
        done = bisect.bisect_right(ticks, tick)
        return consumed[done], seconds[done]

    return at


def curve(history: Sequence[Mapping[str, Any]], validations: Iterable[tuple[int, Mapping[str, float]]]) -> list[Point]:
    """The validations of a run as points. validations: (step before it, metrics); the last at equal rows counts."""
    at, points = until(history), dict[int, Point]()
    for tick, metrics in validations:
        rows, seconds = at(tick)
        points[rows] = Point(rows=rows, seconds=seconds, metrics=dict(metrics))
    return list(points.values())


def seconds_of(row: Mapping[str, Any]) -> float:
    """Of a tick: the mean over workers."""
    return sum(float(row[f"{part}_s"]) for part in PARTS)


def rows_per_s(history: Sequence[Mapping[str, Any]]) -> float:
    """Without the first ticks, 5 % of them and at least 3, but at most half of all; 0 where no time passed."""
    first = min(max(WARM_LEAST, math.ceil(WARM_SHARE * len(history))), len(history) // 2)
    seconds = sum(map(seconds_of, history[first:]))
    return sum(row["rows"] for row in history[first:]) / seconds if seconds else 0.0


def reached(points: Sequence[Point], target: Target) -> tuple[float, float] | None:
    """(seconds, rows) until a curve reaches the target; None where it never does.

    It does at the first point that is at least as good. Between that and the point before: a straight line. A target
    that the very first point reaches counts from there, since nobody knows the metric before.
    """
    before: Point | None = None
    for point in points:
        value = point.metrics.get(target.metric, math.nan)
        if value >= target.value if target.higher else value <= target.value:
            share = 1.0 if before is None else _share(before.metrics[target.metric], value, target.value)
            start = before or point
            return _between(start.seconds, point.seconds, share), _between(start.rows, point.rows, share)
        before = point if math.isfinite(value) else None
    return None


def _share(before: float, after: float, value: float) -> float:
    """How much of the way from `before` to `after` is done at `value`."""
    return (value - before) / (after - before)


def _between(first: float, second: float, share: float) -> float:
    return first + share * (second - first)


# -- over repeats ----------------------------------------------------------------------------------------------------


def numbers(comparison: Comparison, name: str, of: str) -> list[float | None]:
    """A variant's numbers by repeat. of: rows_per_s, seconds, target_seconds, or a metric's name."""
    read: Callable[[Trial], float | None] = (
        (lambda trial: getattr(trial, of)) if of in HIGHER else (lambda trial: trial.metrics.get(of))
    )
    by_repeat = {trial.repeat: read(trial) for trial in comparison.of(name)}
    return [by_repeat.get(repeat) for repeat in range(comparison.repeats)]


def middle(comparison: Comparison, name: str, of: str) -> float | None:
    """The mean over repeats, the geometric one of what is compared as ratios; None where there is none."""
    found = mean(numbers(comparison, name, of), geometric=of in HIGHER)
    return None if found is None else found.middle


def differ(comparison: Comparison, name: str, reference: str, of: str, higher: bool) -> Difference:
    """How one variant differs from another, repeat by repeat; a metric's margin is a share of the reference's mean."""
    own, other = numbers(comparison, name, of), numbers(comparison, reference, of)
    margin = comparison.time_margin
    if of not in HIGHER:
        margin = comparison.metric_margin * abs(middle(comparison, reference, of) or 0.0)
    return difference(own, other, of=of, margin=margin, higher=higher)


def ratio(comparison: Comparison, name: str, reference: str, of: str = "rows_per_s") -> float | None:
    """The ratio of their means, variant / reference; None where one lacks a repeat that the other has."""
    if not all(numbers(comparison, name, of)) or not all(numbers(comparison, reference, of)):
        return None
    own, other = middle(comparison, name, of), middle(comparison, reference, of)
    return own / other if own and other else None


def solos(comparison: Comparison) -> list[Variant]:
    """The one with one thread, then that with all where there is another."""
    return [variant for variant in comparison.variants if variant.solo]


def faster(comparison: Comparison, name: str, base: str) -> Difference:
    """How a variant differs from another in what decides: the time to the target, else rows a second."""
    of = "rows_per_s" if comparison.target is None else "target_seconds"
    return differ(comparison, name, base, of, HIGHER[of])


def better_solo(comparison: Comparison) -> str:
    """What others have to beat: solo with all threads, the reference, unless one thread is surely better."""
    first, reference = solos(comparison)[0].name, comparison.reference
    return first if first != reference and faster(comparison, first, reference).outcome == "better" else reference


def speed_up(comparison: Comparison, name: str) -> SpeedUp:
    """How many times as many rows a second as solo with one thread and with all.

    Efficiency is against one thread, over workers times threads; where solo has no second variant (a GPU, a simulated
    cluster, one core) over workers alone.
    """
    first, *_, last = [*solos(comparison), comparison.variant(comparison.reference)]
    variant = comparison.variant(name)
    one = ratio(comparison, name, first.name)
    ideal = variant.workers * (variant.threads if len(solos(comparison)) > 1 else 1)
    return SpeedUp(one, ratio(comparison, name, last.name), None if one is None else one / ideal)
