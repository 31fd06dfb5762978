"""The columns of a comparison, a row for each variant: the one model of the page's table, the terminal's and Markdown's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from manyhands import units
from manyhands.evidence.compare import measures
from manyhands.evidence.compare.comparison import Comparison, Difference, Variant
from manyhands.evidence.compare.significance import HIGHER
from manyhands.recording.history import PARTS
from manyhands.server.staleness import quantile

OUTCOMES = {"better": "better", "worse": "worse", "same": "same", "unclear": "no difference seen"}
NOTHING = "–"
COST = "Cost and rate"
UNKNOWN_AT_0 = ("rows_per_s", "worker_seconds", "effective_rate")

Say = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """What stands at a variant and a column."""

    text: str  # the mean over repeats
    between: str = ""  # the least and the most of the repeats
    note: str = ""  # of repeats that are not in the mean
    interval: str = ""  # of the difference from the reference
    mark: str = ""  # a key of OUTCOMES, or ""
    title: str = ""  # what the mark rests on, in a sentence

    @property
    def lines(self) -> tuple[str, ...]:
        """In small letters below the text."""
        return tuple(line for line in (self.between, self.note, self.interval) if line)


Cell = Callable[[Variant], TableCell]


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """One thing measured, and what it is called where; "": it is not shown there."""

    group: str
    label: str = ""  # on the page, under the name of its group
    terminal: str = ""  # may have two lines
    markdown: str = ""
    spare: int = 0  # the column with the highest is the first that a narrow terminal leaves out; 0: it stays
    about: str = ""  # what is in it, in a sentence
    cell: Cell


def columns(comparison: Comparison) -> tuple[TableColumn, ...]:
    """Those that have something to say of any variant."""
    every = (
        *_speed(comparison),
        *_target(comparison),
        *_result(comparison),
        *_optimum(comparison),
        *_distance(comparison),
        *_cost(comparison),
    )
    ended = [variant for variant in comparison.variants if comparison.of(variant.name)]
    return tuple(column for column in every if any(column.cell(variant).text != NOTHING for variant in ended))


# -- columns by group ----------------------------------------------------------------------------------------------------------


def _speed(comparison: Comparison) -> list[TableColumn]:
    found = [
        TableColumn(
            group="Speed",
            label="rows/s",
            terminal="rows/s",
            markdown="rows/s",
            about="Rows that all workers together train on in a second of the loop, without its first ticks.",
            cell=_mean(comparison, "rows_per_s", units.number),
        ),
        TableColumn(group="Speed", terminal="±", cell=_spread(comparison)),
    ]
    for solo in comparison.solos:
        found.append(
            TableColumn(
                group="Speed",
                label="" if solo.name == comparison.reference else f"× {solo.name}",  # rows/s has it, with its interval
                terminal=f"× solo,\n{units.count(solo.threads, 'thread')}",
                markdown=f"× {solo.name}",
                spare=0 if solo.name == comparison.reference else 2,
                about=f"rows/s over those of {solo.name}: the ratio of their means, which is the mean of the repeats' ratios.",
                cell=_ratio(comparison, solo, lambda ratio, _: units.times(ratio)),
            )
        )
    if comparison.solos:
        first = comparison.solos[0]
        found.append(
            TableColumn(
                group="Speed",
                label="efficiency",
                terminal="effi-\nciency",
                spare=4,
                about=f"× {first.name} as a share of the ideal, which is as many times as fast as there are threads, or workers, more.",
                cell=_ratio(comparison, first, lambda ratio, of: units.percent(ratio / measures.ideal(comparison, of))),
            )
        )
    return found


def _spread(comparison: Comparison) -> Cell:
    """Half of what lies between the least and the largest rows/s, as a share of the mean."""

    def cell(variant: Variant) -> TableCell:
        found = measures.mean_of(comparison, variant.name, "rows_per_s")
        if found is None or found.low == found.high:
            return TableCell(text=NOTHING)
        return TableCell(text=f"±{50 * (found.high - found.low) / found.middle:.0f} %")

    return cell


def _ratio(comparison: Comparison, solo: Variant, say: Callable[[float, Variant], str]) -> Cell:
    def cell(variant: Variant) -> TableCell:
        found = measures.speed_up(comparison, variant.name, solo.name)
        return TableCell(text=NOTHING if found is None or variant == solo else say(found.middle, variant))

    return cell


def _target(comparison: Comparison) -> list[TableColumn]:
    if comparison.target is None:
        return []
    group = f"Until {comparison.target}"
    until = "until the target was reached: a straight line between two validations."
    never = {"absent": "never", "missing": "never"}
    return [
        TableColumn(
            group=group,
            label="time",
            terminal="time to\ntarget",
            markdown=f"time to {comparison.target}",
            about=f"Seconds of training {until}",
            cell=_mean(comparison, "target_seconds", units.even_duration, **never),
        ),
        TableColumn(
            group=group,
            label="rows",
            terminal="rows to\ntarget",
            spare=3,
            about=f"Rows that all workers together consumed {until}",
            cell=_mean(comparison, "target_rows", units.number, **never),
        ),
    ]


def _result(comparison: Comparison) -> list[TableColumn]:
    def column(name: str) -> TableColumn:
        judged = name == comparison.metric
        return TableColumn(
            group="At the end",
            label=name,
            terminal=name.replace("_", "\n", 1) if judged else "",
            markdown=name if judged else "",
            about=f"{name} when the training was over, of all workers' one answer.",
            cell=_mean(comparison, name, units.metric),
        )

    return [column(name) for name in measures.final_metrics(comparison)]


def _optimum(comparison: Comparison) -> list[TableColumn]:
    if not comparison.optimum:
        return []
    group = "Against the optimum"
    return [
        TableColumn(
            group=group,
            label="distance",
            terminal="from the\noptimum",
            markdown="distance from the optimum",
            spare=1,
            about="Of the final parameters, |p − x| / |x|.",
            cell=_mean(comparison, "optimum_distance", units.small),
        ),
        TableColumn(
            group=group,
            label="excess loss",
            terminal="excess\nloss",
            markdown="excess loss",
            spare=2,
            about="The loss over all training rows, less the least.",
            cell=_mean(comparison, "excess_loss", _small_signed),
        ),
    ]


def _distance(comparison: Comparison) -> list[TableColumn]:
    group = f"Against {comparison.reference}"

    def others(of: str, say: Say) -> Cell:
        cell = _mean(comparison, of, say)
        return lambda variant: TableCell(text=NOTHING) if variant.name == comparison.reference else cell(variant)

    kinds = {trial.agreement_of for trial in comparison.trials if trial.agreement_of}
    same = "Share of rows that both predict alike." if kinds <= {"classes"} else "1 − |o − s| / |s| of the outputs."
    return [
        TableColumn(
            group=group,
            label="distance",
            terminal="distance\nfrom solo",
            markdown="distance from solo",
            spare=5,
            about="Of the final parameters, |p − s| / |s|; 0 is bit-equal.",
            cell=others("distance", units.small),
        ),
        TableColumn(
            group=group,
            label="cosine",
            about="Of the angle between what both moved from the common start.",
            cell=others("cosine", "{:.3f}".format),
        ),
        TableColumn(
            group=group,
            label="agreement",
            terminal="same\nanswers",
            spare=6,
            about=same,
            cell=others("agreement", lambda share: f"{100 * share:.1f} %"),
        ),
    ]


def _cost(comparison: Comparison) -> list[TableColumn]:
    found = [
        TableColumn(
            group=COST,
            label="worker-seconds",
            terminal="worker\nseconds",
            about="Seconds of the loop times workers.",
            cell=_mean(comparison, "worker_seconds", units.short),
        ),
        *(TableColumn(group=COST, terminal=part, spare=3, cell=_share(comparison, part)) for part in PARTS),
        *_input(comparison),
        TableColumn(
            group=COST,
            label="sent",
            terminal="sent",
            markdown="bytes sent",
            about="Bytes that all workers together sent.",
            cell=_mean(comparison, "bytes", units.size),
        ),
        TableColumn(group=COST, terminal="staleness\nmedian", spare=4, cell=_staleness(comparison)),
        TableColumn(
            group=COST,
            label="memory",
            terminal="memory\na worker",
            about="The most that the process of any one worker held.",
            cell=_mean(comparison, "most_memory", units.size),
        ),
        TableColumn(
            group=COST,
            label="effective rate",
            about="What the learning rate amounts to: rules that add the workers' updates instead of averaging them go as many times as far.",
            cell=_mean(comparison, "effective_rate", units.number),
        ),
    ]
    if any(trial.unused for trial in comparison.trials):
        about = "Rows whose gradient was dropped or skipped."
        unused = _mean(comparison, "unused", units.number)
        found.append(TableColumn(group=COST, label="unused rows", about=about, cell=unused))
    return found


def _input(comparison: Comparison) -> list[TableColumn]:
    """Of rows that are read of files; the terminal has the share of time beside those of the other parts."""
    if not any(trial.input for trial in comparison.trials):
        return []
    return [
        TableColumn(
            group=COST,
            label="waiting for input",
            markdown="waiting for input",
            about="Share of the workers' time in which they wait for rows.",
            cell=_share(comparison, "input"),
        ),
        TableColumn(
            group=COST,
            label="read",
            terminal="read",
            markdown="bytes read",
            about="Bytes that all workers together read from the files or their store, without what came from the host's cache.",
            cell=_mean(comparison, "bytes_read", units.size),
        ),
    ]


def _share(comparison: Comparison, part: str) -> Cell:
    """Of a worker's time."""

    def cell(variant: Variant) -> TableCell:
        shares = measures.shares_of_time(comparison, variant.name)
        return TableCell(text=units.percent(shares[part]) if shares else NOTHING)

    return cell


def _staleness(comparison: Comparison) -> Cell:
    def cell(variant: Variant) -> TableCell:
        pushes = measures.staleness(comparison, variant.name)
        return TableCell(text=f"{quantile(pushes, 0.5)}" if pushes else NOTHING)

    return cell


def _small_signed(value: float) -> str:
    """Below 0 where rounding, or a declared optimum that is none, makes it so."""
    return f"−{units.small(-value)}" if value < 0 else units.small(value)


# -- what a cell says ------------------------------------------------------------------------------------------------------------


def _mean(comparison: Comparison, of: str, say: Say, *, absent: str = NOTHING, missing: str = "not finite") -> Cell:
    """The mean over repeats, and how it differs from the reference where that was compared.

    of: as `measures.number` takes it. absent: where no repeat has a value. missing: of repeats without one.
    """

    def cell(variant: Variant) -> TableCell:
        found, differs = measures.mean_of(comparison, variant.name, of), comparison.difference(variant.name, of)
        if not comparison.of(variant.name) or (found is not None and of in UNKNOWN_AT_0 and not found.high):
            return TableCell(text=NOTHING)
        if found is None:
            plain = TableCell(text=absent)
        else:
            between = units.between(found.low, found.high, say)
            plain = TableCell(text=say(found.middle), between=between)
            if found.missing:
                return replace(plain, note=f"{found.missing} {missing}")
        if differs is None or plain.text == NOTHING:
            return plain
        margin, what = f"{differs.margin:.3g}", "as a difference from"
        if of in HIGHER:
            margin, what = units.percent(differs.margin), "as a multiple of"
        bounds = interval(differs)
        title = (
            f"{OUTCOMES[differs.outcome]}: {bounds or 'not in every repeat'}, mean and 95 % interval, {what} "
            f"{comparison.reference}; up to {margin} is no difference."
        )
        return replace(plain, interval=bounds, mark=differs.outcome, title=title)

    return cell


def interval(difference: Difference) -> str:
    """`1.62× [1.55, 1.70]`, `+0.002 [−0.004, +0.008]`; no brackets for a single repeat, "" without a ratio."""
    say = units.times if difference.of in HIGHER else units.signed
    if not math.isfinite(difference.middle):
        return ""
    if not (math.isfinite(difference.low) and math.isfinite(difference.high)):
        return say(difference.middle)
    low, high = say(difference.low).rstrip("×"), say(difference.high).rstrip("×")
    return f"{say(difference.middle)} [{low}, {high}]"
