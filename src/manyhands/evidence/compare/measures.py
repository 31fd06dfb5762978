"""A comparison's trials as numbers: of one trial, over repeats, along a run. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from manyhands.evidence.compare.comparison import Comparison, Difference, Point, Target, Trial, Variant
from manyhands.evidence.compare.metric import TEST, TRAIN, VALIDATION
from manyhands.evidence.compare.significance import HIGHER, Mean, difference, mean
from manyhands.recording.history import PARTS

WARM_SHARE, WARM_LEAST = 0.05, 3  # first ticks that a rate leaves out: memory is taken, caches fill
GEOMETRIC = (*HIGHER, "worker_seconds")  # rates and times; all else has the arithmetic mean
OF_TRIALS = frozenset(
    (
        *GEOMETRIC,
        "launch_seconds",
        *("target_rows", "distance", "cosine", "agreement", "rows", "unused", "bytes", "bytes_read"),
        *("most_memory", "effective_rate"),
        *("optimum_distance", "excess_loss"),
    )
)
"""What a trial has one number of; any other name is one of its metrics."""
MOST_DRAWN = 12  # variants in a chart


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
            start, share = before or point, 1.0
            if before is not None:
                share = (target.value - before.metrics[target.metric]) / (value - before.metrics[target.metric])
            seconds, rows = point.seconds - start.seconds, point.rows - start.rows
            return start.seconds + share * seconds, start.rows + share * rows
        before = point if math.isfinite(value) else None
    return None


# -- over repeats ----------------------------------------------------------------------------------------------------


def number(trial: Trial, of: str) -> float | None:
    """of: a name in OF_TRIALS, or a metric's."""
    value: float | None = getattr(trial, of) if of in OF_TRIALS else trial.metrics.get(of)
    return value


def numbers(comparison: Comparison, name: str, of: str) -> list[float | None]:
    """A variant's numbers by repeat; None where its trial is missing, too."""
    by_repeat = {trial.repeat: number(trial, of) for trial in comparison.of(name)}
    return [by_repeat.get(repeat) for repeat in range(comparison.repeats)]


def mean_of(comparison: Comparison, name: str, of: str) -> Mean | None:
    """Over a variant's trials that came to their end."""
    return mean((number(trial, of) for trial in comparison.of(name)), geometric=of in GEOMETRIC)


def middle(comparison: Comparison, name: str, of: str) -> float | None:
    """The mean over repeats alone."""
    found = mean_of(comparison, name, of)
    return None if found is None else found.middle


def middles(comparison: Comparison, of: str) -> dict[str, float]:
    """The mean of each variant of which every repeat has a value, in the order of the variants."""
    found = {variant.name: mean_of(comparison, variant.name, of) for variant in comparison.variants}
    return {name: one.middle for name, one in found.items() if one is not None and not one.missing}


def differ(comparison: Comparison, name: str, reference: str, of: str, higher: bool) -> Difference:
    """How one variant differs from another, repeat by repeat; a metric's margin is a share of the reference's mean."""
    own, other = numbers(comparison, name, of), numbers(comparison, reference, of)
    margin = comparison.time_margin
    if of not in HIGHER:
        margin = comparison.metric_margin * abs(middle(comparison, reference, of) or 0.0)
    return difference(own, other, of=of, margin=margin, higher=higher)


def faster(comparison: Comparison, name: str, base: str) -> Difference:
    """How a variant differs from another in what decides."""
    return differ(comparison, name, base, comparison.speed_of, HIGHER[comparison.speed_of])


def better_solo(comparison: Comparison) -> str:
    """What others have to beat: solo with all threads, the reference, unless one thread is surely better."""
    first, reference = comparison.solos[0].name, comparison.reference
    return first if first != reference and faster(comparison, first, reference).outcome == "better" else reference


def speed_up(comparison: Comparison, name: str, base: str) -> Mean | None:
    """rows/s over those of `base`: the ratio of their means, the least and the most of the repeats.

    None where one lacks a repeat that the other has.
    """
    own, other = numbers(comparison, name, "rows_per_s"), numbers(comparison, base, "rows_per_s")
    pairs = [a / b for a, b in zip(own, other, strict=True) if a and b]
    return mean(pairs, geometric=True) if len(pairs) == len(own) else None


def ideal(comparison: Comparison, variant: Variant) -> float:
    """The speed-up against solo with one thread if nothing were lost: workers times threads.

    Where solo has no second variant (a GPU, a simulated cluster, one core) it is workers alone.
    """
    return variant.workers * (variant.threads if len(comparison.solos) > 1 else 1)


def final_metrics(comparison: Comparison) -> tuple[str, ...]:
    """What the table shows: the judged metric, then the same on the training and on the test rows."""
    known = {name for trial in comparison.trials for name in trial.metrics}
    bare = _bare(comparison.metric)
    return tuple(name for name in dict.fromkeys((comparison.metric, TRAIN + bare, TEST + bare)) if name in known)


def times_of_workers(comparison: Comparison, name: str) -> tuple[dict[str, float], ...]:
    """By worker: {part: seconds}, means over repeats; () where they are not known."""
    timings = [trial.timing for trial in comparison.of(name) if trial.timing]
    return tuple(
        {part: fmean(one.get(part, 0.0) for one in worker) for part in PARTS} for worker in zip(*timings, strict=False)
    )


def shares_of_time(comparison: Comparison, name: str) -> dict[str, float]:
    """{part: share} of the time of all workers of a variant; {} where it is not known."""
    workers = times_of_workers(comparison, name)
    seconds = {part: sum(worker[part] for worker in workers) for part in PARTS}
    total = sum(seconds.values())
    return {part: value / total for part, value in seconds.items()} if total else {}


def staleness(comparison: Comparison, name: str) -> dict[int, int]:
    """{versions: pushes} of all repeats, in the order of versions."""
    total = sum((Counter(trial.staleness) for trial in comparison.of(name)), Counter())
    return dict(sorted(total.items()))


def drawn(comparison: Comparison, most: int = MOST_DRAWN) -> tuple[Variant, ...]:
    """At most so many variants, in order: solo, then the best by the target, else by the judged metric."""
    ended = [variant for variant in comparison.variants if comparison.of(variant.name)]
    solos = [variant for variant in ended if variant.solo]
    others = sorted((variant for variant in ended if not variant.solo), key=lambda one: _rank(comparison, one.name))
    kept = {*solos, *others[: max(0, most - len(solos))]}
    return tuple(variant for variant in ended if variant in kept)


def _rank(comparison: Comparison, name: str) -> tuple[float, float]:
    """Less is better."""
    reached, metric = (mean_of(comparison, name, of) for of in ("target_seconds", comparison.metric))
    sooner = math.inf if reached is None or reached.missing else reached.middle
    if metric is None:
        return sooner, math.inf
    return sooner, -metric.middle if comparison.higher else metric.middle


# -- along a run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Course:
    """A number at each validation: the validations of repeats are at the same rows, and are averaged in order."""

    rows: tuple[float, ...]  # means over repeats, as are the seconds
    seconds: tuple[float, ...]
    values: tuple[Mean | None, ...]


def course(comparison: Comparison, name: str, of: Callable[[Point], float | None]) -> Course | None:
    """As far as all repeats of the variant went; None where there is nothing finite."""
    together = list(zip(*(trial.curve for trial in comparison.of(name)), strict=False))
    values = tuple(mean(of(point) for point in points) for points in together)
    if not any(values):
        return None
    return Course(
        rows=tuple(fmean(point.rows for point in points) for points in together),
        seconds=tuple(_seconds(points) for points in together),
        values=values,
    )


def _seconds(points: Sequence[Point]) -> float:
    found = mean((point.seconds for point in points), geometric=True)
    return 0.0 if found is None else found.middle


def curve_metric(comparison: Comparison) -> str:
    """The metric drawn over a run: the target's, else the judged one, else the nearest validated one; or ""."""
    known = {name for trial in comparison.trials for point in trial.curve for name in point.metrics}
    kin = [prefix + _bare(comparison.metric) for prefix in (TEST, VALIDATION, TRAIN, "")]
    wanted = [*([comparison.target.metric] if comparison.target else []), comparison.metric, *kin]
    return next((name for name in wanted if name in known), "")


def _bare(metric: str) -> str:
    """`accuracy` of `test_accuracy`"""
    return next((metric.removeprefix(one) for one in (TRAIN, VALIDATION, TEST) if metric.startswith(one)), metric)
