"""The charts of the report: each a question, the sentence or two that answer it, and the figure.

The sentences are made of the comparison's numbers; "" where there is nothing to say.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from manyhands import units
from manyhands.evidence.compare import bars, drawing, figures, measures
from manyhands.evidence.compare.comparison import Comparison, Point
from manyhands.evidence.compare.measures import Course
from manyhands.server.staleness import quantile

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

T = TypeVar("T")

INPUT_SHARE = 0.10  # of the time; from here on input is mentioned


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """An entry of a legend: a line's style and its name."""

    name: str
    variant_style: drawing.VariantStyle
    group: str = ""  # the `legendgroup` of the traces that it shows and hides; "": it does not


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A question, the sentence that answers it from the data, and the figure that shows it."""

    name: str
    question: str
    reading: str
    figure: Mapping[str, Any] | None
    """As plotly.js takes it, without plotly's own legend; None where a sentence says it all."""
    legend: tuple[LegendEntry, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    """{part of the time: colour}, a legend too."""


def charts(comparison: Comparison) -> list[tuple[Chart, ...]]:
    """Alone, or two beside each other that share a legend: those that have something to show, and a caption in place of the
    distance where every variant is bit-equal to solo."""
    best, metric = "highest" if comparison.higher else "lowest", measures.curve_metric(comparison)
    parts = {part: drawing.PART_HUES[part][0] for part in bars.ORDER}

    def chart(figure: Figure | None, read: Callable[[Comparison], str], question: str, **more: Any) -> Chart:
        name, reading = read.__name__, read(comparison)
        if figure is None:
            return Chart(name=name, question=question, reading=reading, figure=None)
        page = json.loads(figure.update_layout(showlegend=False).to_json())
        return Chart(name=name, question=question, reading=reading, figure=page, legend=_legend(figure), **more)

    over_time, over_rows = figures.metric(comparison, "seconds"), figures.metric(comparison, "rows")
    apart_in_rows, apart_in_time = figures.distance(comparison, "rows"), figures.distance(comparison, "seconds")

    groups = (
        (
            chart(over_time, metric_over_time, f"Who has the {best} {metric} after the same time?"),
            chart(over_rows, metric_over_rows, "Who learns most from the same rows?"),
        ),
        (chart(bars.time_split(comparison), time_split, "Where does the time of each worker go?", parts=parts),),
        (
            chart(figures.speed_up(comparison), speed_up, "How much faster do more workers make it?"),
            chart(figures.time_to_target(comparison), time_to_target, "How soon do more workers reach the target?"),
        ),
        (
            chart(apart_in_rows, distance_over_rows, "How far from solo do they end up?"),
            chart(apart_in_time, distance_over_time, "Do they come back to solo?"),
        ),
        (chart(bars.staleness(comparison), staleness, "How late are the updates that reach the server?"),),
        (
            chart(bars.bytes_sent(comparison), bytes_sent, "How much is sent?"),
            chart(bars.memory(comparison), memory, "How much memory does a worker need?"),
        ),
    )
    measured = [
        tuple(one for one in group if one.figure or (one.name == "distance_over_rows" and one.reading))
        for group in groups
    ]
    return [group for group in measured if group]


def left_out(comparison: Comparison) -> str:
    """Which variants and workers the charts do not show, or ""."""
    shown = measures.drawn(comparison)
    missing = [one.name for one in comparison.variants if comparison.of(one.name) and one not in shown]
    parts = []
    if missing:
        by = f"soonest at {comparison.target}" if comparison.target else f"best in {comparison.metric}"
        others = sum(not one.solo for one in shown)
        best = "one that was" if others == 1 else f"{others} others that were"
        parts.append(f"The charts show solo and the {best} {by}, not {units.named(missing)}; the table has all.")
    most = max((len(measures.times_of_workers(comparison, one.name)) for one in shown), default=0)
    if most > bars.room(len(shown)):
        parts.append(
            f"Of many workers, at most {bars.room(len(shown))} a variant are drawn, from the one that computed least to the one that computed most."
        )
    return " ".join(parts)


# -- legends ----------------------------------------------------------------------------------------------------------------


def _legend(figure: Figure) -> tuple[LegendEntry, ...]:
    """Of the lines of a figure, in its order; () of one without lines."""
    found = []
    for line in figure.data:
        if line.type != "scatter" or line.showlegend is False:
            continue
        symbol = line.marker.symbol  # a list where it says how many workers, which then differ along the line
        look = drawing.VariantStyle(
            colour=line.line.color,
            dash=line.line.dash or "solid",
            symbol=symbol if isinstance(symbol, str) else "",
            width=line.line.width,
        )
        found.append(LegendEntry(name=html.unescape(line.name), variant_style=look, group=line.legendgroup or ""))
    return tuple(found)


# -- what they say of the metric ----------------------------------------------------------------------------------------------------------------


def metric_over_time(comparison: Comparison) -> str:
    """Who stood where when the first had ended."""
    metric = measures.curve_metric(comparison)
    found = _courses(comparison, lambda point: point.metrics.get(metric))
    if not found:
        return ""
    end = min(course.seconds[-1] for course in found.values())
    after = units.even_duration(end)
    values = {}
    for name, course in found.items():
        seconds, means = zip(*_known_means(course), strict=True)
        values[name] = float(np.interp(end, seconds, means))  # a straight line between two validations
    best, worst = _extremes(values, comparison.higher)
    level = [name for name in values if units.metric(values[name]) == units.metric(values[best])]
    if best == worst:
        return f"{best} ended with {metric} {units.metric(values[best])} after {after}."
    others = [name for name in dict.fromkeys((comparison.reference, worst)) if name in values and name not in level]
    rest = "".join(f"; {name} {units.metric(values[name])}" for name in others)
    ahead = f"{best} was ahead" if len(level) == 1 else f"{units.named(level)} were level"
    return f"When the first had ended, after {after}, {ahead} with {metric} {units.metric(values[best])}{rest}."


def metric_over_rows(comparison: Comparison) -> str:
    """What the judged metric was after all rows."""
    ends = measures.middles(comparison, comparison.metric)
    if not ends:
        return ""
    best, worst = _extremes(ends, comparison.higher)
    if best == worst:
        return f"After all rows {best} has {comparison.metric} {units.metric(ends[best])}."
    between = f"{units.metric(ends[worst])} ({worst}) and {units.metric(ends[best])} ({best})"
    return f"After all rows {comparison.metric} is between {between}."


# -- distance from solo ----------------------------------------------------------------------------------------------------------


def distance_over_rows(comparison: Comparison) -> str:
    """Who ends where, as shares of the length of solo's parameters, and who is bit-equal."""
    found = measures.middles(comparison, "distance")
    found.pop(comparison.reference, None)
    if not found:
        return ""
    equal = [name for name in found if found[name] == 0]
    apart = {name: value for name, value in found.items() if value > 0}
    parts = [f"Bit-equal to {comparison.reference} at the end: {units.named(equal)}."] if equal else []
    if apart:
        far, near = _extremes(apart)
        ends = f"At the end the parameters of {far} are {_length(apart[far])} of their length away from those of {comparison.reference}"
        parts.append(f"{ends}; those of {near} {_length(apart[near])}." if near != far else f"{ends}.")
    return " ".join(parts)


def distance_over_time(comparison: Comparison) -> str:
    """Where the farthest was farthest, and where it ended: whether it comes back."""
    courses = _courses(comparison, lambda point: point.distance)
    known = {name: _known_means(course) for name, course in courses.items() if name != comparison.reference}
    peaks = {name: max(means, key=lambda one: one[1]) for name, means in known.items()}
    peaks = {name: peak for name, peak in peaks.items() if peak[1] > 0}
    if not peaks:
        return ""
    name = max(peaks, key=lambda one: peaks[one][1])
    (at, most), (_, last) = peaks[name], known[name][-1]
    farthest = f"{name} was farthest away, {_length(most)}, after {units.even_duration(at)}"
    return (
        f"{farthest}, and came back to {_length(last)}."
        if last < 0.9 * most
        else f"{farthest}: the distance grows to the end."
    )


def _length(distance: float) -> str:
    """Relative distances as people say them: in percent while that has digits."""
    return units.percent(distance) if distance >= 1e-3 else units.small(distance)


# -- time, speed, cost -----------------------------------------------------------------------------------------------------------


def time_split(comparison: Comparison) -> str:
    """Who loses most to exchanging and waiting, who least, and whether input is in the way."""
    shares = _known(comparison, lambda name: measures.shares_of_time(comparison, name))
    lost = {name: one["exchange"] + one["wait"] for name, one in shares.items() if comparison.variant(name).workers > 1}
    parts = []
    if lost:
        most, least = _extremes(lost)
        of = shares[most]
        parts.append(
            f"Workers of {most} spend {units.percent(of['exchange'])} of their time exchanging and {units.percent(of['wait'])} waiting"
            + (f", the most; {least} both together {units.percent(lost[least])}." if least != most else ".")
        )
    slow = {name: one["input"] for name, one in shares.items() if one["input"] >= INPUT_SHARE}
    if slow:
        worst = max(slow, key=slow.__getitem__)
        parts.append(f"Input takes {units.percent(slow[worst])} of the time of {worst}.")
    elif shares:
        parts.append(f"Input takes less than {units.percent(INPUT_SHARE)} everywhere.")
    return " ".join(parts)


def speed_up(comparison: Comparison) -> str:
    """Who is fastest, how near the ideal, and what solo itself gets from more threads."""
    solos = comparison.solos
    found = {
        one: ratio.middle
        for one in comparison.variants
        if solos and (ratio := measures.speed_up(comparison, one.name, solos[0].name))
    }
    known = {one: ratio for one, ratio in found.items() if not one.solo}
    if not known:
        return ""
    best = max(known, key=lambda one: known[one])
    one, share = solos[0].name, units.percent(known[best] / measures.ideal(comparison, best))
    if known[best] < 1:
        text = f"No variant is as fast as {one}; the nearest, {best.name}, reaches {units.times(known[best])} of it, {share} of the ideal"
    else:
        text = f"{best.name} is fastest, {units.times(known[best])} as fast as {one}, {share} of the ideal"
    threads = found.get(solos[-1]) if len(solos) > 1 else None
    return f"{text}; {solos[-1].name} alone gets {units.times(threads)}." if threads else f"{text}."


def time_to_target(comparison: Comparison) -> str:
    """Who reaches the target soonest, and who never."""
    if comparison.target is None or not comparison.solos:
        return ""
    first = comparison.solos[0].name
    found = measures.middles(comparison, "target_seconds")
    others = {name: seconds for name, seconds in found.items() if not comparison.variant(name).solo}
    never = [one.name for one in comparison.variants if comparison.of(one.name) and one.name not in found]
    late = f" Not in every repeat: {units.named(never)}." if never else ""
    if not others:
        return late.strip()
    soonest = min(others, key=others.__getitem__)
    text = f"{soonest} reaches {comparison.target} soonest, after {units.even_duration(others[soonest])}"
    if first in found:
        text += f"; {first} after {units.even_duration(found[first])}"
    return f"{text}.{late}"


def staleness(comparison: Comparison) -> str:
    """Whose pushes are latest, and how late half and the latest of them are."""
    found = _known(comparison, lambda name: measures.staleness(comparison, name))
    if not found:
        return ""
    worst = max(found, key=lambda name: (quantile(found[name], 0.5), max(found[name])))
    middle, latest = quantile(found[worst], 0.5), max(found[worst])
    fresh = [name for name in found if max(found[name]) == 0]
    others = f" Never late: {units.named(fresh)}." if fresh and worst not in fresh else ""
    if latest == 0:
        return f"No push was late: {units.named(list(found))}."
    half = f"{units.count(middle, 'version')} late or more" if middle else "not late"
    return f"Half of the pushes of {worst} are {half}, the latest is {units.count(latest, 'version')} late.{others}"


def bytes_sent(comparison: Comparison) -> str:
    """Who sends most and least of those that send anything, and how many bytes a row that is."""
    sent = {name: value for name, value in measures.middles(comparison, "bytes").items() if value}
    if not sent:
        return ""
    rows = measures.middles(comparison, "rows")
    most, least = _extremes(sent)
    text = f"{most} sends {units.size(sent[most])}, {units.size(sent[most] / max(1, rows[most]))} for each row"
    if most == least:
        return f"{text}."
    share = sent[least] / sent[most]
    part = f"{units.short(1 / share)} times less" if share < 0.5 else f"{units.percent(share)} of that"
    return f"{text}; {least} sends {units.size(sent[least])}, {part}."


def memory(comparison: Comparison) -> str:
    """Whose workers need most, and how that stands to solo's process."""
    held = measures.middles(comparison, "most_memory")
    if not held:
        return ""
    most = max(held, key=held.__getitem__)
    workers = comparison.variant(most).workers
    together = f", {units.size(workers * held[most])} for its {workers}" if workers > 1 else ""
    alone = held.get(comparison.reference)
    against = f"; {comparison.reference} {units.size(alone)}" if alone and most != comparison.reference else ""
    return f"A worker of {most} needs the most, {units.size(held[most])}{together}{against}."


# -- what they share -------------------------------------------------------------------------------------------------------------


def _extremes(values: Mapping[str, float], higher: bool = True) -> tuple[str, str]:
    """(the name with the best value, that with the worst)"""
    names = sorted(values, key=values.__getitem__, reverse=higher)
    return names[0], names[-1]


def _known(comparison: Comparison, of: Callable[[str], T | None]) -> dict[str, T]:
    found = {variant.name: of(variant.name) for variant in comparison.variants}
    return {name: value for name, value in found.items() if value}


def _courses(comparison: Comparison, of: Callable[[Point], float | None]) -> dict[str, Course]:
    return _known(comparison, lambda name: measures.course(comparison, name, of))


def _known_means(course: Course) -> list[tuple[float, float]]:
    """[(seconds, mean)] of the validations that have one."""
    pairs = zip(course.seconds, course.values, strict=True)
    return [(seconds, value.middle) for seconds, value in pairs if value is not None]
