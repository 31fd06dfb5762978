"""A sentence or two for each chart, made of the comparison's numbers; "" where there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from manyhands.evidence.compare import means, measures, wording
from manyhands.evidence.compare.comparison import Comparison, Trial
from manyhands.evidence.compare.means import Course
from manyhands.evidence.compare.significance import HIGHER
from manyhands.server.staleness import quantile

T = TypeVar("T")
INPUT_SHARE = 0.10  # of the time; from here on input is mentioned


# -- the metric ----------------------------------------------------------------------------------------------------------------


def metric_over_time(comparison: Comparison) -> str:
    """Who was first at the target; without one, who stood where when the first had ended."""
    if comparison.target is not None:
        return _at_target(comparison, lambda trial: trial.target_seconds, "target_seconds", "after {}", wording.seconds)
    metric, found = _courses(comparison)
    if not found:
        return ""
    end = min(course.seconds[-1] for course in found.values())
    values = {name: _at(course, end) for name, course in found.items()}
    best, worst = _best(values, comparison.higher), _best(values, not comparison.higher)
    if best == worst:
        return f"{best} ended with {metric} {wording.metric(values[best])} after {wording.seconds(end)}."
    others = [name for name in dict.fromkeys((comparison.reference, worst)) if name in values and name != best]
    rest = ", ".join(f"{name} {wording.metric(values[name])}" for name in others)
    return f"When the first had ended, after {wording.seconds(end)}, {best} was ahead with {metric} {wording.metric(values[best])}; {rest}."


def metric_over_rows(comparison: Comparison) -> str:
    """Who needed the fewest rows to the target; and what the judged metric was after all rows."""
    first = ""
    if comparison.target is not None:
        first = _at_target(comparison, lambda trial: trial.target_rows, "target_rows", "with {} rows", wording.number)
    ends = means.middles(comparison, means.metric_of(comparison.metric))
    if len(ends) < 2:
        return first
    best, worst = _best(ends, comparison.higher), _best(ends, not comparison.higher)
    spans = f"After all rows {comparison.metric} is between {wording.metric(ends[worst])} ({worst}) and {wording.metric(ends[best])} ({best})."
    return " ".join(part for part in (first, spans, _different(comparison)) if part)


def _at_target(
    comparison: Comparison, of: Callable[[Trial], float | None], compared: str, how: str, say: Callable[[float], str]
) -> str:
    ended = [variant.name for variant in comparison.variants if comparison.of(variant.name)]
    reached = {name: say(value) for name, value in _sorted(means.middles(comparison, of, compared in HIGHER)).items()}
    never = [name for name in ended if name not in reached]
    if not reached:
        return f"Nobody reached {comparison.target} in every repeat." if ended else ""
    first, reference = next(iter(reached)), comparison.reference
    alike = [name for name in reached if reached[name] == reached[first]]
    verb = "reaches" if len(alike) == 1 else "reach"
    parts = [f"{wording.named(alike)} {verb} {comparison.target} first, {how.format(reached[first])}"]
    if reference in reached and reference not in alike:
        parts.append(f"{reference} {how.format(reached[reference])}{_sure(comparison, first, compared)}")
    return "; ".join(parts) + "." + (f" Not in every repeat: {wording.named(never)}." if never else "")


def _sure(comparison: Comparison, name: str, compared: str) -> str:
    """What the trials bear: that a variant is only seemingly ahead of the reference."""
    found = comparison.difference(name, compared)
    return " (no difference seen between the two)" if found is not None and not found.different else ""


def _different(comparison: Comparison) -> str:
    """Whose final metric differs from the reference's; where nobody's does, whether that is known to be so."""
    outcomes = {name: _outcome(comparison, name) for name in comparison.differences}
    kinds = {kind: [name for name in outcomes if outcomes[name] == kind] for kind in ("better", "worse")}
    found = [f"{kind}: {wording.named(names)}" for kind, names in kinds.items() if names]
    if found:
        return f"Against {comparison.reference}, {', '.join(found)}."
    if outcomes and all(one == "same" for one in outcomes.values()):
        return f"That is the same as of {comparison.reference} for all, within the margin."
    return f"No difference from {comparison.reference} was seen." if outcomes else ""


def _outcome(comparison: Comparison, name: str) -> str:
    found = comparison.difference(name, comparison.metric)
    return "" if found is None else found.outcome


# -- distance from solo ----------------------------------------------------------------------------------------------------------


def distance_over_rows(comparison: Comparison) -> str:
    """Who ends where, as shares of the length of solo's parameters, and who is bit-equal."""
    found = means.middles(comparison, lambda trial: trial.distance)
    found.pop(comparison.reference, None)
    if not found:
        return ""
    equal = [name for name in found if found[name] == 0]
    apart = {name: value for name, value in found.items() if value > 0}
    parts = [f"Bit-equal to {comparison.reference} at the end: {wording.named(equal)}."] if equal else []
    if apart:
        near, far = min(apart, key=apart.__getitem__), max(apart, key=apart.__getitem__)
        ends = f"At the end the parameters of {far} are {_length(apart[far])} of their length away from those of {comparison.reference}"
        parts.append(f"{ends}; those of {near} {_length(apart[near])}." if near != far else f"{ends}.")
    return " ".join(parts)


def distance_over_time(comparison: Comparison) -> str:
    """Where the farthest was farthest, and where it ended: whether it comes back."""
    courses = _all_courses(comparison, lambda point: point.distance)
    peaks = {name: _peak(course) for name, course in courses.items() if name != comparison.reference}
    peaks = {name: peak for name, peak in peaks.items() if peak[1] > 0}
    if not peaks:
        return ""
    name = max(peaks, key=lambda one: peaks[one][1])
    (at, most), last = peaks[name], [value for value in courses[name].values if value is not None][-1].middle
    farthest = f"{name} was farthest away, {_length(most)}, after {wording.seconds(at)}"
    return (
        f"{farthest}, and came back to {_length(last)}."
        if last < 0.9 * most
        else f"{farthest}: the distance grows to the end."
    )


def _peak(course: Course) -> tuple[float, float]:
    """(seconds, value) of the largest mean."""
    return max(
        ((at, value.middle) for at, value in zip(course.seconds, course.values, strict=True) if value is not None),
        key=lambda pair: pair[1],
    )


def _length(distance: float) -> str:
    """Relative distances as people say them: in percent while that has digits."""
    return wording.percent(distance) if distance >= 1e-3 else wording.small(distance)


# -- time, speed, cost -----------------------------------------------------------------------------------------------------------


def time_split(comparison: Comparison) -> str:
    """Who loses most to exchanging and waiting, who least, and whether input is in the way."""
    shares = _known(comparison, lambda name: means.shares_of_time(comparison, name))
    lost = {name: one["exchange"] + one["wait"] for name, one in shares.items() if comparison.variant(name).workers > 1}
    parts = []
    if lost:
        most, least = max(lost, key=lost.__getitem__), min(lost, key=lost.__getitem__)
        of = shares[most]
        parts.append(
            f"Workers of {most} spend {wording.percent(of['exchange'])} of their time exchanging and {wording.percent(of['wait'])} waiting"
            + (f", the most; {least} both together {wording.percent(lost[least])}." if least != most else ".")
        )
    slow = {name: one["input"] for name, one in shares.items() if one["input"] >= INPUT_SHARE}
    if slow:
        worst = max(slow, key=slow.__getitem__)
        parts.append(f"Input takes {wording.percent(slow[worst])} of the time of {worst}.")
    elif shares:
        parts.append(f"Input takes less than {wording.percent(INPUT_SHARE)} everywhere.")
    return " ".join(parts)


def speed_up(comparison: Comparison) -> str:
    """Who is fastest, how near the ideal, and what solo itself gets from more threads."""
    solos = measures.solos(comparison)
    found = (
        {} if not solos else {one: measures.ratio(comparison, one.name, solos[0].name) for one in comparison.variants}
    )
    known = {one: ratio for one, ratio in found.items() if ratio is not None and not one.solo}
    if not known:
        return ""
    best = max(known, key=lambda one: known[one])
    one, share = solos[0].name, wording.percent(known[best] / means.ideal(comparison, best))
    if known[best] < 1:
        text = f"No variant is as fast as {one}; the nearest, {best.name}, reaches {wording.times(known[best])} of it, {share} of the ideal"
    else:
        text = f"{best.name} is fastest, {wording.times(known[best])} as fast as {one}, {share} of the ideal"
    threads = found[solos[-1]] if len(solos) > 1 else None
    return f"{text}; {solos[-1].name} alone gets {wording.times(threads)}." if threads else f"{text}."


def staleness(comparison: Comparison) -> str:
    """Whose pushes are latest, and how late half and the latest of them are."""
    found = _known(comparison, lambda name: means.staleness(comparison, name))
    if not found:
        return ""
    worst = max(found, key=lambda name: (quantile(found[name], 0.5), max(found[name])))
    middle, latest = quantile(found[worst], 0.5), max(found[worst])
    fresh = [name for name in found if max(found[name]) == 0]
    others = f" Never late: {wording.named(fresh)}." if fresh and worst not in fresh else ""
    if latest == 0:
        return f"No push was late: {wording.named(list(found))}."
    half = f"{wording.count(middle, 'version')} late or more" if middle else "not late"
    return f"Half of the pushes of {worst} are {half}, the latest is {wording.count(latest, 'version')} late.{others}"


def bytes_sent(comparison: Comparison) -> str:
    """Who sends most and least of those that send anything, and how many bytes a row that is."""
    sent = {name: value for name, value in means.middles(comparison, lambda trial: trial.bytes).items() if value}
    if not sent:
        return ""
    rows = means.middles(comparison, lambda trial: trial.rows)
    most, least = max(sent, key=sent.__getitem__), min(sent, key=sent.__getitem__)
    text = f"{most} sends {wording.size(sent[most])}, {wording.size(sent[most] / max(1, rows[most]))} for each row"
    if most == least:
        return f"{text}."
    return f"{text}; {least} sends {wording.size(sent[least])}, {_part_of(sent[least] / sent[most])}."


def memory(comparison: Comparison) -> str:
    """Whose workers need most, and how that stands to solo's process."""
    held = means.middles(comparison, means.most_memory)
    if not held:
        return ""
    most = max(held, key=held.__getitem__)
    workers = comparison.variant(most).workers
    together = f", {wording.size(workers * held[most])} for its {workers}" if workers > 1 else ""
    alone = held.get(comparison.reference)
    against = f"; {comparison.reference} {wording.size(alone)}" if alone and most != comparison.reference else ""
    return f"A worker of {most} needs the most, {wording.size(held[most])}{together}{against}."


def _part_of(share: float) -> str:
    """`a 12th of that`, or `38 % of that`"""
    return f"{1 / share:.3g} times less" if share < 0.5 else f"{wording.percent(share)} of that"


# -- what they share -------------------------------------------------------------------------------------------------------------


def _best(values: Mapping[str, float], higher: bool) -> str:
    return (max if higher else min)(values, key=values.__getitem__)


def _sorted(values: Mapping[str, float]) -> dict[str, float]:
    """From the least."""
    return dict(sorted(values.items(), key=lambda pair: pair[1]))


def _known(comparison: Comparison, of: Callable[[str], T]) -> dict[str, T]:
    found = {variant.name: of(variant.name) for variant in comparison.variants}
    return {name: value for name, value in found.items() if value}


def _courses(comparison: Comparison) -> tuple[str, dict[str, Course]]:
    metric = means.curve_metric(comparison)
    return metric, _all_courses(comparison, lambda point: point.metrics.get(metric))


def _all_courses(comparison: Comparison, of: Callable[..., float | None]) -> dict[str, Course]:
    found = {variant.name: means.course(comparison, variant.name, of) for variant in comparison.variants}
    return {name: course for name, course in found.items() if course is not None}


def _at(course: Course, seconds: float) -> float:
    """The mean there: a straight line between two validations."""
    known = [(at, value.middle) for at, value in zip(course.seconds, course.values, strict=True) if value is not None]
    return float(np.interp(seconds, [at for at, _ in known], [value for _, value in known]))
