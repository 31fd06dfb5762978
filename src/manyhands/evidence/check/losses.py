"""Whether the loss and the metrics are means, and what they are if they are not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyhands.data.batch import rows_of, slice_rows
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.batches import COUPLED, MEAN, OTHER_WEIGHT, SUM, Law, Subject, gradients_add, law_of
from manyhands.evidence.check.building import listed
from manyhands.evidence.check.copies import Copies
from manyhands.evidence.check.examining import Examination
from manyhands.evidence.check.findings import BREAKS, Finding, SourceLocation
from manyhands.evidence.check.function_mode import SUM as SUMS
from manyhands.evidence.check.function_mode import sums_up
from manyhands.evidence.check.interventions import IN_PLACE, FunctionCall
from manyhands.evidence.check.operations import OperationLog, OperationRecord, first_mixing
from manyhands.evidence.check.trial_config import SLICES, SUMMED

EXACT, ROUGH = 1e-9, 1e-3
"""Within so much the two sides of a law are the same: in float64, and in another dtype."""
OF_METRICS = 1e-5
"""Metrics may go through float32 on their way."""
_MIXED = (11, 7, 5, 3, 2, 1)
"""Rows of each third of a batch that is looked at for operations that mix rows: odd ones, which other sizes are seldom multiples of."""

_SUMMED = (
    "The loss adds up over rows: {first:.6g} for the first half of a batch and {whole:.6g} for all of it{constant}. "
    "Each worker adds up its slice, and the mean over workers is the whole sum divided by N, so gradients are N "
    "times smaller than on one worker. Return the mean (reduction='mean', .mean()), or (sum / count, count) where "
    "rows count differently."
)
_OTHER_WEIGHT = (
    "The loss is a mean, but not over what it says it counts: by its weight ({said}), that of parts of a batch misses "
    "that of the whole by {off:.1e}. It divides by something else, such as tokens that are not padding, or class "
    "weights. Return (mean, what it divides by), so that slices with more of it count more."
)
_COUPLED = (
    "What a row contributes depends on the rows beside it{by}: by their weights, the losses of parts of a batch miss "
    "that of the whole by {off:.1e}. A worker sees its slice alone: in-batch contrast has fewer negatives, "
    "statistics are those of fewer rows. If it is meant so, accept it, or give each worker as many rows as one had; "
    "if not, look for a sum, mean or softmax over dimension 0, or for a batch that is not the first dimension."
)
_METRIC = (
    "evaluate's {name} is no mean: for a batch it is {whole:.6g}, and the mean of its parts, by weight, misses that "
    "by {off:.1e}{how}. Workers evaluate their slices, and means by weight are reported, so N workers report another "
    "number than one. Return a mean over rows, or (mean, weight); what is no mean, such as F1 or AUC, compute from "
    "run.predict()."
)


_UNSETTLED = "the same rows give other numbers each time"
_DRAWS = "it draws from {drawn}, and parts of a batch draw other numbers than the whole"


def examine_loss(examination: Examination) -> None:
    """Add the suspect that the loss is, or that it holds. For an examination that has run."""
    tolerance = EXACT if examination.double else ROUGH
    if not examination.finite:
        return
    if not examination.settles:
        why = _DRAWS.format(drawn=listed(examination.drawn)) if examination.reproducible else _UNSETTLED
        examination.unjudged.append(f"whether the loss is a mean: {why}")
        return
    law = _law(examination, tolerance)
    if law is None:
        examination.unjudged.append("whether the loss is a mean: it fails on fewer rows than a batch has")
        return
    numbers, loss = law.numbers | {"off": law.off}, examination.loss_place()
    if law.kind == MEAN:
        examination.held.append("the loss is a mean, by the weight that it says")
    elif law.kind == SUM:
        constant = ", but for a part that does not depend on rows" if law.constant else ""
        text = _SUMMED.format(constant=constant, **numbers)
        remedy = SLICES if law.constant else SUMMED
        examination.add("summed-loss", remedy, [_sum_of(examination) or loss], text, **numbers)
    elif law.kind == OTHER_WEIGHT:
        text = _OTHER_WEIGHT.format(said=_weight_text(examination), **numbers)
        examination.add("wrong-weight", SLICES, [loss], text, **numbers)
    else:
        mixing = _mixing(examination)
        by = "" if mixing is None else f" (first seen after {mixing.function})"
        at = loss if mixing is None or mixing.place is None else mixing.place
        examination.add("coupled-rows", SLICES, [at], _COUPLED.format(by=by, **numbers), **numbers)
        _add_summed_loss(examination, numbers)


def _add_summed_loss(examination: Examination, numbers: dict[str, Any]) -> None:
    """Where rows depend on each other, no law says whether the loss adds up or by what its mean is; the sums in it say the first."""
    sums = _sums_over_rows(examination)
    if sums:
        text = _SUMMED.format(constant="", **numbers)
        examination.add("summed-loss", SUMMED, [sums[-1] or examination.loss_place()], text, **numbers)
    examination.unjudged.append(
        "whether the loss is a mean by the weight that it says: rows depend on those beside them, so the losses of parts say nothing about it"
    )


def _sums_over_rows(examination: Examination) -> list[SourceLocation | None]:
    """Where everything is added up, over more numbers for more rows, and the loss grows as the sum does, whatever its length.

    A sum that is divided by its length has another derivative for half of the rows.
    """
    n = rows_of(examination.batch)
    whole, half = (_sums(examination, slice_rows(examination.batch, 0, rows)) for rows in (n, n // 2))
    if len(whole) != len(half):
        return []
    pairs = zip(whole, half, strict=True)
    return [
        one.place
        for one, other in pairs
        if one.length > other.length and math.isclose(one.slope, other.slope, rel_tol=ROUGH)
    ]


@dataclass(frozen=True)
class _Sum:
    """Over everything, to one number."""

    length: int
    slope: float
    """Of the loss over it."""
    place: SourceLocation | None


def _sums(examination: Examination, rows: Any) -> list[_Sum]:
    found: list[tuple[int, Tensor, SourceLocation | None]] = []

    def after(call: FunctionCall, result: Any) -> None:
        if sums_up(call, result) and result.requires_grad:
            result.retain_grad()
            found.append((call.target.numel(), result, source_locations.running()))

    examination.settled(rows, after=after)
    return [_Sum(length, float(one.grad), place) for length, one, place in found if one.grad is not None]


def _law(examination: Examination, tolerance: float) -> Law | None:
    """None where the loss fails on fewer rows than a batch has."""

    def number(rows: Any) -> tuple[float, float]:
        found = examination.settled(rows)
        return found.loss, found.weight

    for least in (1, 2, 4):
        try:
            law = law_of(number, examination.batch, tolerance, least)
            adds = law.kind != MEAN or gradients_add(examination.settled, examination.batch, tolerance, least)
        except Exception:  # noqa: BLE001 - the user's loss on so few rows: what it raises does not matter, more are tried
            continue
        return law if adds else Law(COUPLED, law.off, numbers=law.numbers)
    return None


def _weight_text(examination: Examination) -> str:
    first, rows = examination.first, rows_of(examination.batch)
    assert first is not None
    return f"{first.weight:g} for {rows} rows" if first.weight != rows else f"its {rows} rows"


def _sum_of(examination: Examination) -> SourceLocation | None:
    """Where everything is added up to one number, the last time before the loss is returned."""
    assert examination.first is not None
    sums = [one.place for one in examination.first.seen if one.kind == SUMS and one.place is not None]
    return sums[-1] if sums else None


def _mixing(examination: Examination) -> OperationRecord | None:
    """The first operation whose result for the same rows depends on those beside them."""
    third = next((k for k in _MIXED if 3 * k <= rows_of(examination.batch)), None)
    if third is None:
        return None
    journals = OperationLog(2 * third), OperationLog(2 * third)
    for start, journal in zip((0, third), journals, strict=True):
        examination.settled(slice_rows(examination.batch, start, start + 2 * third), after=journal.after)
    return first_mixing(*journals)


# -- metrics ---------------------------------------------------------------------------------------------------------------


def examine_metrics(copies: Copies, double: bool, batch: Any) -> tuple[list[Finding], list[str]]:
    """(findings, what held) of the task's `evaluate`, on a batch that it evaluates. Raises what the user's code raises."""
    task = copies.fresh()
    subject = Subject(task, double)
    where = source_locations.as_tuple(source_locations.of_function(task.evaluate))
    whole = subject.metrics(batch)
    found = [finding for name in whole if (finding := _metric(subject, name, batch, where)) is not None]
    changed, seen = subject.changed_by_metrics(batch)
    if changed:
        written = next((one.place for one in seen if one.kind == IN_PLACE and one.place is not None), None)
        found.append(
            Finding(
                kind=IN_PLACE,
                severity=BREAKS,
                text=f"evaluate changes {listed(changed)}: validation trains, by rows that nobody counts, and a "
                "worker without rows of a validation batch does not take part. Only the optimizer may change "
                "parameters.",
                places=source_locations.as_tuple(written) or where,
                numbers={"names": list(changed)},
            )
        )
    return found, [] if found else [f"metrics are means ({', '.join(whole)})"]


def _metric(subject: Subject, name: str, batch: Any, where: tuple[SourceLocation, ...]) -> Finding | None:
    law = law_of(lambda rows: subject.metrics(rows)[name], batch, OF_METRICS, 1)
    if law.kind == MEAN:
        return None
    how = {SUM: ": it adds up", OTHER_WEIGHT: ": it is a mean by something else"}.get(law.kind, "")
    return Finding(
        kind="metric-not-mean",
        severity=BREAKS,
        text=_METRIC.format(name=name, whole=law.numbers.get("whole", float("nan")), off=law.off, how=how),
        places=where,
        numbers={"metric": name, **law.numbers},
    )
