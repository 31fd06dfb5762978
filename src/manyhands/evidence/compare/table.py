"""The table of a comparison: a row for each variant, a column for each measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.evidence.compare import means, measures, wording
from manyhands.evidence.compare.comparison import Comparison, Difference, Trial, Variant
from manyhands.evidence.compare.significance import HIGHER, Mean

OUTCOMES = {"better": "better", "worse": "worse", "same": "same", "unclear": "no difference seen"}
NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """What stands at a variant and a column."""

    text: str
    """The mean over repeats."""
    lines: tuple[str, ...] = ()
    """In small letters below it: what the repeats lie between, the interval of a difference."""
    mark: str = ""
    """A key of OUTCOMES, or ""."""
    title: str = ""
    """What the mark rests on, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """One thing measured."""

    group: str
    label: str
    about: str
    """What is in it, in a sentence."""
    cell: Callable[[Variant], TableCell]


def columns(comparison: Comparison) -> tuple[TableColumn, ...]:
    """Those that have something to say of any variant."""
    every = (
        *_speed(comparison),
        *_target(comparison),
        *_result(comparison),
        *_distance(comparison),
        *_cost(comparison),
    )
    ended = [variant for variant in comparison.variants if comparison.of(variant.name)]
    return tuple(column for column in every if any(column.cell(variant).text != NOTHING for variant in ended))


def of_trials(
    comparison: Comparison,
    of: Callable[[Trial], float | None],
    say: Callable[[float], str],
    compared: str = "",
    geometric: bool = False,
) -> Callable[[Variant], TableCell]:
    """The cell of a number of each trial; `compared`: its difference's name; `geometric`: for rates and times."""

    def cell(variant: Variant) -> TableCell:
        found = means.of_variant(comparison, variant.name, of, geometric)
        if found is None:
            return TableCell(text=NOTHING)
        lines = (*_between(found, say), *_missing(found))
        return _marked(TableCell(text=say(found.middle), lines=lines), comparison, variant, compared)

    return cell


# -- columns by group ----------------------------------------------------------------------------------------------------------


def _speed(comparison: Comparison) -> tuple[TableColumn, ...]:
    rate = of_trials(comparison, lambda trial: trial.rows_per_s or None, wording.number, "rows_per_s", geometric=True)
    about = "Rows that all workers together train on in a second of the loop, without its first ticks."
    efficient = (
        " Efficient is the share of the ideal, which is as many times as fast as there are threads, or workers, more."
    )
    solos = measures.solos(comparison)
    against = [
        TableColumn(
            group="Speed",
            label=f"× {solo.name}",
            about=f"rows/s over those of {solo.name}: the ratio of their means, which is the mean of the repeats' ratios."
            + (efficient if i == 0 else ""),
            cell=_ratio(comparison, solo, with_efficiency=i == 0),
        )
        for i, solo in enumerate(solos)
    ]
    return TableColumn(group="Speed", label="rows/s", about=about, cell=rate), *against


def _ratio(comparison: Comparison, solo: Variant, with_efficiency: bool) -> Callable[[Variant], TableCell]:
    def cell(variant: Variant) -> TableCell:
        found = measures.ratio(comparison, variant.name, solo.name)
        if found is None or variant == solo:
            return TableCell(text=NOTHING)
        efficient = f"{wording.percent(found / means.ideal(comparison, variant))} efficient"
        return TableCell(text=wording.times(found), lines=(efficient,) if with_efficiency else ())

    return cell


def _target(comparison: Comparison) -> tuple[TableColumn, ...]:
    if comparison.target is None:
        return ()
    group, until = (
        f"Until {comparison.target}",
        "until the target was reached: a straight line between two validations.",
    )
    time = _reached(comparison, lambda trial: trial.target_seconds, wording.seconds, "target_seconds")
    rows = _reached(comparison, lambda trial: trial.target_rows, wording.number, "target_rows")
    return (
        TableColumn(group=group, label="time", about=f"Seconds of training {until}", cell=time),
        TableColumn(group=group, label="rows", about=f"Rows that all workers together consumed {until}", cell=rows),
    )


def _reached(
    comparison: Comparison, of: Callable[[Trial], float | None], say: Callable[[float], str], compared: str
) -> Callable[[Variant], TableCell]:
    """As `of_trials`, but a repeat without a value is one that did not reach the target."""

    def cell(variant: Variant) -> TableCell:
        trials, found = comparison.of(variant.name), means.of_variant(comparison, variant.name, of, compared in HIGHER)
        if found is None:
            never = TableCell(text="not reached" if trials else NOTHING)
            return _marked(never, comparison, variant, compared)
        often = (f"in {len(trials) - found.missing} of {len(trials)} repeats",) if found.missing else ()
        text = TableCell(text=say(found.middle), lines=(*_between(found, say), *often))
        return text if found.missing else _marked(text, comparison, variant, compared)

    return cell


def _result(comparison: Comparison) -> tuple[TableColumn, ...]:
    return tuple(
        TableColumn(
            group="At the end",
            label=name,
            about=f"{name} when the training was over, of all workers' one answer.",
            cell=of_trials(comparison, means.metric_of(name), wording.metric, name),
        )
        for name in means.final_metrics(comparison)
    )


def _distance(comparison: Comparison) -> tuple[TableColumn, ...]:
    def column(label: str, about: str, of: Callable[[Trial], float | None], say: Callable[[float], str]) -> TableColumn:
        cell = of_trials(comparison, of, say)
        return TableColumn(
            group=f"Against {comparison.reference}",
            label=label,
            about=about,
            cell=lambda variant: TableCell(text=NOTHING) if variant.name == comparison.reference else cell(variant),
        )

    kinds = {trial.agreement_of for trial in comparison.trials if trial.agreement_of}
    same = "Share of rows that both predict alike." if kinds <= {"classes"} else "1 − |o − s| / |s| of the outputs."
    return (
        column(
            "distance",
            "Of the final parameters, |p − s| / |s|; 0 is bit-equal.",
            lambda trial: trial.distance,
            wording.small,
        ),
        column(
            "cosine", "Of the angle between what both moved from the common start.", lambda trial: trial.cosine, _three
        ),
        column("agreement", same, lambda trial: trial.agreement, _exact_percent),
    )


def _cost(comparison: Comparison) -> tuple[TableColumn, ...]:
    def column(label: str, about: str, of: Callable[[Trial], float | None], say: Callable[[float], str]) -> TableColumn:
        return TableColumn(group="Cost and rate", label=label, about=about, cell=of_trials(comparison, of, say))

    unused = column(
        "unused rows", "Rows whose gradient was dropped or skipped.", lambda trial: trial.unused, wording.number
    )
    rate = column(
        "effective rate",
        "What the learning rate amounts to: rules that add the workers' updates instead of averaging them go as many times as far.",
        lambda trial: trial.effective_rate or None,
        wording.number,
    )
    return (
        *([unused] if any(trial.unused for trial in comparison.trials) else []),
        column("sent", "Bytes that all workers together sent.", lambda trial: trial.bytes, wording.size),
        column(
            "memory",
            "The most that the process of any one worker held.",
            means.most_memory,
            wording.size,
        ),
        TableColumn(
            group="Cost and rate",
            label="worker-seconds",
            about="Seconds of the loop times workers.",
            cell=of_trials(comparison, lambda trial: trial.worker_seconds or None, wording.number, geometric=True),
        ),
        rate,
    )


# -- what a cell says ------------------------------------------------------------------------------------------------------------


def _between(found: Mean, say: Callable[[float], str]) -> tuple[str, ...]:
    bounds = wording.between(found.low, found.high, say)
    return (bounds,) if bounds else ()


def _missing(found: Mean) -> tuple[str, ...]:
    return (f"{wording.count(found.missing, 'repeat')} not finite",) if found.missing else ()


def _marked(cell: TableCell, comparison: Comparison, variant: Variant, compared: str) -> TableCell:
    """With how it differs from the reference, where that was compared."""
    found = comparison.difference(variant.name, compared) if compared else None
    if found is None:
        return cell
    return TableCell(
        text=cell.text,
        lines=(*cell.lines, *filter(None, [interval(found)])),
        mark=found.outcome,
        title=_rests_on(found, comparison),
    )


def is_ratio(difference: Difference) -> bool:
    """Seconds and rates are compared as ratios, metrics as differences."""
    return difference.of in HIGHER


def interval(difference: Difference) -> str:
    """`1.62× [1.55, 1.70]`, `+0.002 [−0.004, +0.008]`; no brackets for a single repeat, "" without a ratio."""
    say = wording.times if is_ratio(difference) else wording.signed
    if not math.isfinite(difference.middle):
        return ""
    if not (math.isfinite(difference.low) and math.isfinite(difference.high)):
        return say(difference.middle)
    low, high = say(difference.low).rstrip("×"), say(difference.high).rstrip("×")
    return f"{say(difference.middle)} [{low}, {high}]"


def _rests_on(difference: Difference, comparison: Comparison) -> str:
    margin = wording.percent(difference.margin) if is_ratio(difference) else f"{difference.margin:.3g}"
    what = "as a multiple of" if is_ratio(difference) else "as a difference from"
    bounds = interval(difference) or "not in every repeat"
    return f"{OUTCOMES[difference.outcome]}: {bounds}, mean and 95 % interval, {what} {comparison.reference}; up to {margin} is no difference."


def _three(value: float) -> str:
    return f"{value:.3f}"


def _exact_percent(share: float) -> str:
    return f"{100 * share:.1f} %"
