"""Whether the loss and the metrics are means, and what they are if they are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from manyhands.data.batch import rows_of, slice_rows
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.copies import SLICES, SUMMED, Copies
from manyhands.evidence.check.examination import BatchMeasurement, Examination, Subject
from manyhands.evidence.check.interventions import (
    FULL_SUM,
    IN_PLACE,
    FunctionCall,
    OperationLog,
    OperationRecord,
    first_mixing,
    is_full_sum,
)
from manyhands.evidence.check.report import Results
from manyhands.evidence.check.source_locations import SourceLocation
from manyhands.units import listed

MEAN, SUM, OTHER_WEIGHT, COUPLED = "mean", "sum", "other-weight", "coupled"

EXACT, ROUGH = 1e-9, 1e-3  # relative tolerances of losses in float64 and in another dtype
OF_METRICS = 1e-5  # relative tolerance of metrics, which may be computed in float32
_MIXED = (11, 7, 5, 3, 2, 1)
"""Rows in each third of a batch in which operations that mix rows are searched. Other dimensions are seldom multiples
of odd sizes."""

_SUMMED = (
    "The loss adds up over rows: {first:.6g} for the first half of a batch and {whole:.6g} for all of it{constant}. "
    "Each worker adds up its slice, and the mean over workers is the whole sum divided by N, so gradients are N "
    "times smaller than on one worker. Return the mean (reduction='mean', .mean()), or (sum / count, count) where "
    "rows count differently."
)
_OTHER_WEIGHT = (
    "The loss is a mean, but not over the weight that it returns ({weight}): the mean by that weight over parts of a "
    "batch differs from the loss of the whole by {off:.1e}. It divides by something else, such as tokens that are not "
    "padding, or class weights. Return (mean, what it divides by), so that slices with more of it count more."
)
_COUPLED = (
    "A row's contribution depends on the other rows in the batch{by}: the weighted mean of the losses of parts of a "
    "batch differs from the loss of the whole by {off:.1e}. A worker has only its slice: in-batch contrast has fewer "
    "negatives, statistics are those of fewer rows. With the task's batches=\"whole\" the loss is one process's. If a "
    "slice's loss is intended, accept it, or give each worker as many rows as one had; if not, look for a sum, mean or softmax over dimension 0, or for a batch that is not the first "
    "dimension."
)
_METRIC = (
    "evaluate's {name} is not a mean: for a batch it is {whole:.6g}, and the weighted mean of its parts differs from "
    "that by {off:.1e}{how}. Workers evaluate their slices, and weighted means are reported, so N workers report "
    "another number than one. Return a mean over rows, or (mean, weight); compute metrics that are not means, such as "
    "F1 or AUC, from run.predict()."
)


def examine_loss(examination: Examination) -> None:
    """After `examination.run()`: add the suspect that the loss is, or that it is a mean as it must be."""
    if not examination.finite:
        return
    if not examination.is_deterministic:
        drawn = listed(examination.drawn)
        why = "the same rows give other numbers each time"
        if examination.reproducible:
            why = f"it draws from {drawn}, and parts of a batch draw other numbers than the whole"
        examination.results.unjudged.append(f"whether the loss is a mean: {why}")
        return
    aggregation = _loss_aggregation(examination, EXACT if examination.double else ROUGH)
    if aggregation is None:
        examination.results.unjudged.append("whether the loss is a mean: it fails on fewer rows than a batch has")
        return
    numbers, loss = aggregation.numbers | {"off": aggregation.off}, examination.loss_place()
    suspect = examination.results.suspect
    if aggregation.kind == MEAN:
        examination.results.held.append("the loss is a mean, by the weight that it returns")
    elif aggregation.kind == SUM:
        constant = ", but for a part that does not depend on rows" if aggregation.constant else ""
        text = _SUMMED.format(constant=constant, **numbers)
        remedy = SLICES if aggregation.constant else SUMMED
        assert examination.first is not None
        sums = [one.place for one in examination.first.recorded if one.kind == FULL_SUM and one.place is not None]
        suspect("summed-loss", remedy, text, sums[-1] if sums else loss, **numbers)  # the last before the loss returns
    elif aggregation.kind == OTHER_WEIGHT:
        first, rows = examination.first, rows_of(examination.batch)
        assert first is not None
        weight = f"{first.weight:g} for {rows} rows" if first.weight != rows else f"its {rows} rows"
        text = _OTHER_WEIGHT.format(weight=weight, **numbers)
        suspect("wrong-weight", SLICES, text, loss, **numbers)
    else:
        mixing = _mixing(examination)
        by = "" if mixing is None else f" (first seen after {mixing.function})"
        at = loss if mixing is None or mixing.place is None else mixing.place
        suspect("coupled-rows", SLICES, _COUPLED.format(by=by, **numbers), at, **numbers)
        _examine_coupled(examination, numbers)


def _examine_coupled(examination: Examination, numbers: dict[str, Any]) -> None:
    """Where rows depend on each other, losses of parts do not show whether the loss adds up. Its sums over rows do."""
    sums = _sums_over_rows(examination)
    if sums:
        text = _SUMMED.format(constant="", **numbers)
        examination.results.suspect("summed-loss", SUMMED, text, sums[-1] or examination.loss_place(), **numbers)
    examination.results.unjudged.append(
        "whether the loss is a mean by the weight that it returns: rows depend on the others in the batch, so the "
        "losses of parts do not show it"
    )


def _sums_over_rows(examination: Examination) -> list[SourceLocation | None]:
    """The places of sums over all elements that grow with the rows and that the loss is not divided by.

    If a sum is divided by its length, the derivative of the loss by the sum changes with half of the rows.
    """
    n = rows_of(examination.batch)
    whole, half = (_sums(examination, slice_rows(examination.batch, 0, rows)) for rows in (n, n // 2))
    if len(whole) != len(half):
        return []
    pairs = zip(whole, half, strict=True)
    return [
        place
        for (length, slope, place), (fewer, of_half, _) in pairs
        if length > fewer and math.isclose(slope, of_half, rel_tol=ROUGH)
    ]


def _sums(examination: Examination, rows: Any) -> list[tuple[int, float, SourceLocation | None]]:
    """[(how many numbers are added, the derivative of the loss by their sum, the place)] of sums over all elements."""
    found: list[tuple[int, Tensor, SourceLocation | None]] = []

    def after(call: FunctionCall, result: Any) -> None:
        if is_full_sum(call, result) and result.requires_grad:
            result.retain_grad()
            found.append((call.target.numel(), result, source_locations.running()))

    examination.measure_repeatable(rows, after=after)
    return [(length, float(one.grad), place) for length, one, place in found if one.grad is not None]


def _loss_aggregation(examination: Examination, tolerance: float) -> Aggregation | None:
    """None if the loss fails on fewer rows than a batch has."""

    def number(rows: Any) -> tuple[float, float]:
        found = examination.measure_repeatable(rows)
        return found.loss, found.weight

    for least in (1, 2, 4):
        try:
            aggregation = aggregation_of(number, examination.batch, tolerance, least)
            is_mean = aggregation.kind == MEAN
            coupled = is_mean and not gradients_add(examination.measure_repeatable, examination.batch, tolerance, least)
        except Exception:  # noqa: BLE001 - the user's loss may fail on so few rows: try more
            continue
        return Aggregation(COUPLED, aggregation.off, numbers=aggregation.numbers) if coupled else aggregation
    return None


def _mixing(examination: Examination) -> OperationRecord | None:
    """The first operation whose result for the same rows depends on the other rows."""
    third = next((k for k in _MIXED if 3 * k <= rows_of(examination.batch)), None)
    if third is None:
        return None
    logs = OperationLog(2 * third), OperationLog(2 * third)
    for start, log in zip((0, third), logs, strict=True):
        examination.measure_repeatable(slice_rows(examination.batch, start, start + 2 * third), after=log.after)
    return first_mixing(*logs)


# -- metrics -----------------------------------------------------------------------------------------------------------


def examine_metrics(copies: Copies, double: bool, batch: Any) -> Results:
    """Of the task's `evaluate` on a batch. Raises what the user's code raises."""
    task, results = copies.fresh(), Results()
    subject = Subject(task, double)
    where = source_locations.of_function(task.evaluate)
    aggregations = {name: _metric_aggregation(subject, name, batch) for name in subject.metrics(batch)}
    for name, aggregation in aggregations.items():
        if aggregation.kind != MEAN:
            how = {SUM: ": it adds up", OTHER_WEIGHT: ": it is a mean by something else"}.get(aggregation.kind, "")
            whole = aggregation.numbers.get("whole", float("nan"))
            text = _METRIC.format(name=name, whole=whole, off=aggregation.off, how=how)
            results.breaks("metric-not-mean", text, where, metric=name, **aggregation.numbers)
    changed, recorded = subject.changed_by_metrics(batch)
    if changed:
        written = next((one.place for one in recorded if one.kind == IN_PLACE and one.place is not None), None)
        text = (
            f"evaluate changes {listed(changed)}: validation rows train the model, and a worker without rows of a "
            "validation batch does not take part. Only the optimizer may change parameters."
        )
        results.breaks(IN_PLACE, text, written or where, names=list(changed))
    if not results.findings:
        results.held.append(f"metrics are means ({', '.join(aggregations)})")
    return results


def _metric_aggregation(subject: Subject, name: str, batch: Any) -> Aggregation:
    return aggregation_of(lambda rows: subject.metrics(rows)[name], batch, OF_METRICS)


# -- the kind of aggregation -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aggregation:
    """How a measure of a whole batch follows from the measures of its parts."""

    kind: str
    """mean: the mean by weight, as it must be. sum: the sum. other-weight: a mean by other weights than it returns.
    coupled: none of these, since a row depends on the other rows."""
    off: float = 0.0  # the relative difference between the mean by weight and the whole
    constant: bool = False  # of a sum: a part of it does not add up (a penalty on the parameters)
    numbers: dict[str, float] = field(default_factory=dict)


Whole = tuple[float, float]  # (mean, weight)


def aggregation_of(measure: Callable[[Any], Whole], batch: Any, tolerance: float, least: int = 1) -> Aggregation:
    """How a measure aggregates over three parts of a batch: A its first half, C the last `least` rows, B the rest.

    mean: L(ABC)·w(ABC) = Σ L(part)·w(part). sum: L(AB) = L(A) + L(B) - constant, and so for any parts. other-weight:
    there are weights by which L(AB), L(BC) and L(ABC) are means of L(A), L(B) and L(C).
    """
    n = rows_of(batch)
    if n < 4 * least:
        return _aggregation_of_two(measure, batch, tolerance)
    middle, last = n // 2, n - least
    cuts = [(0, n), (0, middle), (middle, last), (last, n), (0, last), (middle, n)]
    whole, a, b, c, ab, bc = (measure(slice_rows(batch, *cut)) for cut in cuts)
    scale = max(abs(mean) for mean, _ in (whole, a, b, c, ab, bc)) or 1.0
    off = _off(whole, (a, b, c), scale)
    numbers = {"whole": whole[0], "first": a[0], "second": b[0], "last": c[0]}
    if off <= tolerance:
        return Aggregation(MEAN, off, numbers=numbers)
    added = a[0] + b[0] - ab[0], b[0] + c[0] - bc[0]  # the constant, twice
    adds = abs(added[0] - added[1]) <= tolerance * scale and abs(whole[0] - ab[0] - (bc[0] - b[0])) <= tolerance * scale
    if adds and abs(ab[0] - a[0]) > tolerance * scale:
        return Aggregation(SUM, off, abs(added[0]) > tolerance * scale, numbers)
    kind = OTHER_WEIGHT if _has_weights(whole[0], a[0], b[0], c[0], ab[0], bc[0], tolerance * scale) else COUPLED
    return Aggregation(kind, off, numbers=numbers)


def _aggregation_of_two(measure: Callable[[Any], Whole], batch: Any, tolerance: float) -> Aggregation:
    """Of two halves, where rows are too few for three parts."""
    n = rows_of(batch)
    if n < 2:
        return Aggregation(MEAN)
    whole, a, b = (measure(slice_rows(batch, *cut)) for cut in ((0, n), (0, n // 2), (n // 2, n)))
    scale = max(abs(mean) for mean, _ in (whole, a, b)) or 1.0
    off = _off(whole, (a, b), scale)
    numbers = {"whole": whole[0], "first": a[0], "second": b[0]}
    if off <= tolerance:
        return Aggregation(MEAN, off, numbers=numbers)
    adds = abs(a[0] + b[0] - whole[0]) <= tolerance * scale
    return Aggregation(SUM if adds else COUPLED, off, numbers=numbers)


def _off(whole: Whole, parts: tuple[Whole, ...], scale: float) -> float:
    """The relative error of the mean by weight, or of the sum of the weights if that is larger."""
    total = sum(weight for _, weight in parts)
    mean = sum(mean * weight for mean, weight in parts if weight) / total if total else 0.0
    wrong = abs(total - whole[1]) / max(abs(total), abs(whole[1]), 1e-300)
    missed = abs(mean - whole[0]) / scale
    return max(missed, wrong) if np.isfinite(missed) else float("inf")


def _has_weights(whole: float, a: float, b: float, c: float, ab: float, bc: float, tolerance: float) -> bool:
    """Whether weights exist by which all are means of a, b and c: two pairs determine them, the whole tests them."""
    if min(abs(b - ab), abs(c - bc)) <= tolerance:
        return False
    of_b = (ab - a) / (b - ab)  # relative to the weight of a
    of_c = of_b * (bc - b) / (c - bc)
    if not (of_b > 0 and of_c > 0):
        return False
    return abs((a + of_b * b + of_c * c) / (1 + of_b + of_c) - whole) <= 10 * tolerance * max(1.0, of_b, of_c)


def gradients_add(measure: Callable[[Any], BatchMeasurement], batch: Any, tolerance: float, least: int = 1) -> bool:
    """Whether the gradient of the whole is the weighted mean of its parts' gradients; the last part has `least` rows."""
    n = rows_of(batch)
    if n < 2 * least:
        return True
    whole, a, b = (measure(slice_rows(batch, *cut)) for cut in ((0, n), (0, n - least), (n - least, n)))
    total = a.weight + b.weight
    if not total:
        return True
    mean = a.gradient * (a.weight / total) + b.gradient * (b.weight / total)
    return float((mean - whole.gradient).abs().max()) <= tolerance * max(float(whole.gradient.abs().max()), 1e-300)
