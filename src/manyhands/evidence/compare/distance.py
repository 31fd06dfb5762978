"""The trials of a repeat beside solo's: how far parameters and predictions are from its own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from manyhands.evidence.compare.comparison import Point, Trial
from manyhands.evidence.compare.final_evaluation import Predictions
from manyhands.evidence.compare.probe import Sketch
from manyhands.evidence.compare.trial import FinishedTrial


def compared(finished: Iterable[FinishedTrial], reference: str, start: Tensor) -> list[Trial]:
    """The trials of a repeat, with what sets them apart from the reference's. start: [D] where all of them began."""
    repeat = list(finished)
    solo = next(one for one in repeat if one.trial.variant == reference)
    return [one.trial if one.trial.failure else _compared(one, solo, start) for one in repeat]


def _compared(one: FinishedTrial, solo: FinishedTrial, start: Tensor) -> Trial:
    agreement, of = _agreement(one.predictions, solo.predictions)
    curve = tuple(_placed(point, one.sketches, solo.sketches) for point in one.trial.curve)
    trial = replace(one.trial, curve=curve, agreement=agreement, agreement_of=of)
    own, other = one.parameters, solo.parameters
    if own is None or other is None or own.shape != other.shape:
        return trial
    return replace(trial, distance=distance(own, other), cosine=cosine(own, other, start))


def _agreement(own: Predictions | None, solo: Predictions | None) -> tuple[float | None, str]:
    """(how far they agree, of what)"""
    found = None if own is None or solo is None else own.agreement(solo)
    return found, "" if found is None or own is None else own.of


def _placed(point: Point, own: Mapping[int, Sketch], solo: Mapping[int, Sketch]) -> Point:
    known = point.rows in own and point.rows in solo
    return replace(point, distance=own[point.rows].distance(solo[point.rows])) if known else point


def distance(own: Tensor, solo: Tensor) -> float | None:
    """|p - s| / |s|, 0 where all bits are equal; None where |s| is 0."""
    size = float(solo.double().norm())
    return float((own.double() - solo.double()).norm()) / size if size else None


def cosine(own: Tensor, solo: Tensor, start: Tensor) -> float | None:
    """Of the angle between p - start and s - start; None where one of them did not move."""
    moved, reference = own.double() - start.double(), solo.double() - start.double()
    sizes = float(moved.norm()) * float(reference.norm())
    return max(-1.0, min(1.0, float(moved @ reference) / sizes)) if sizes else None
