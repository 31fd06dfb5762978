"""Aggregates of trials for the report: means with the repeats' range, curves over a run, shares of time. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from manyhands.evidence.compare import measures
from manyhands.evidence.compare.comparison import Comparison, Point, Trial, Variant
from manyhands.evidence.compare.significance import Mean, mean
from manyhands.recording.history import PARTS

PREFIXES = ("train_", "validation_", "test_")
Number = Callable[[Trial], float | None]


def of_variant(comparison: Comparison, name: str, of: Number, geometric: bool = False) -> Mean | None:
    """A number of each trial of a variant that came to its end; geometric: of rates and times."""
    return mean((of(trial) for trial in comparison.of(name)), geometric)


def middles(comparison: Comparison, of: Number, geometric: bool = False) -> dict[str, float]:
    """The mean of each variant of which every repeat has a value, in the order of the variants."""
    found = {variant.name: of_variant(comparison, variant.name, of, geometric) for variant in comparison.variants}
    return {name: one.middle for name, one in found.items() if one is not None and not one.missing}


def repeats(comparison: Comparison) -> int:
    """How many there are trials of: fewer than were asked for where it was interrupted."""
    return len({trial.repeat for trial in comparison.trials})


def metric_of(name: str) -> Number:
    return lambda trial: trial.metrics.get(name)


def most_memory(trial: Trial) -> float | None:
    """Of any one worker."""
    return max(trial.memory, default=None)


# -- over a run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Course:
    """A number at each validation: the validations of repeats are at the same rows, and are averaged in order."""

    rows: tuple[float, ...]
    """Means over repeats, as are the seconds."""
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
    kin = [prefix + bare(comparison.metric) for prefix in ("test_", "validation_", "train_", "")]
    wanted = [*([comparison.target.metric] if comparison.target else []), comparison.metric, *kin]
    return next((name for name in wanted if name in known), "")


def bare(metric: str) -> str:
    """`accuracy` of `test_accuracy`"""
    return next((metric.removeprefix(prefix) for prefix in PREFIXES if metric.startswith(prefix)), metric)


def final_metrics(comparison: Comparison) -> tuple[str, ...]:
    """What the table shows: the judged metric on the training rows, where it was judged, and on the test rows."""
    known = {name for trial in comparison.trials for name in trial.metrics}
    kin = [f"train_{bare(comparison.metric)}", comparison.metric, f"test_{bare(comparison.metric)}"]
    return tuple(dict.fromkeys(name for name in kin if name in known))


# -- speed and time ----------------------------------------------------------------------------------------------------


def speed_up(comparison: Comparison, name: str, base: str) -> Mean | None:
    """rows/s over those of `base`, as `measures.ratio` has it; the least and the most of the repeats."""
    numbers = (measures.numbers(comparison, one, "rows_per_s") for one in (name, base))
    pairs = [own / other for own, other in zip(*numbers, strict=True) if own and other]
    middle = measures.ratio(comparison, name, base)
    return None if middle is None else Mean(middle=middle, low=min(pairs), high=max(pairs))


def ideal(comparison: Comparison, variant: Variant) -> float:
    """The speed-up against solo with one thread if nothing were lost, as `measures.speed_up` has it."""
    return variant.workers * (variant.threads if len(measures.solos(comparison)) > 1 else 1)


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
    found: dict[int, int] = {}
    for trial in comparison.of(name):
        for versions, pushes in trial.staleness.items():
            found[versions] = found.get(versions, 0) + pushes
    return {versions: found[versions] for versions in sorted(found) if found[versions]}


# -- which variants are drawn ------------------------------------------------------------------------------------------


def drawn(comparison: Comparison, most: int) -> tuple[Variant, ...]:
    """At most so many variants, in order: solo, then the best by the target, else by the judged metric."""
    ended = [variant for variant in comparison.variants if comparison.of(variant.name)]
    solos = [variant for variant in ended if variant.solo]
    others = sorted((variant for variant in ended if not variant.solo), key=lambda one: _rank(comparison, one.name))
    kept = {*solos, *others[: max(0, most - len(solos))]}
    return tuple(variant for variant in ended if variant in kept)


def _rank(comparison: Comparison, name: str) -> tuple[float, float]:
    """Less is better."""
    reached = of_variant(comparison, name, lambda trial: trial.target_seconds, geometric=True)
    sooner = math.inf if reached is None or reached.missing else reached.middle
    metric = of_variant(comparison, name, metric_of(comparison.metric))
    if metric is None:
        return sooner, math.inf
    return sooner, -metric.middle if comparison.higher else metric.middle
