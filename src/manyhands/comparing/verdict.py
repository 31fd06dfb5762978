"""The one sentence that a comparison comes to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.comparing import measures
from manyhands.comparing.comparison import Comparison, Difference
from manyhands.comparing.statistics import LEAST_PAIRS


@dataclass(frozen=True)
class _Rival:
    """A variant on several workers, beside the best that one process does."""

    name: str
    speed: Difference
    """In rows a second, or in time to the target."""
    metric: Difference

    @property
    def times(self) -> float:
        """As fast; 0 where it is not known, or where the target was not reached."""
        return self._times(self.speed.middle)

    def _times(self, value: float) -> float:
        known = value > 0 and value < float("inf")
        return (1 / value if self.speed.of == "target_seconds" else value) if known else 0.0

    def range(self) -> tuple[str, str]:
        """`1.55x`, `1.70x`"""
        low, high = sorted((self._times(self.speed.low), self._times(self.speed.high)))
        return f"{low:.2f}x", f"{high:.2f}x"

    @property
    def faster(self) -> bool:
        return self.speed.said == "better"

    @property
    def worse(self) -> bool:
        """In the final metric."""
        return self.metric.said == "worse"


def verdict(comparison: Comparison) -> str:
    """Whether to distribute, and how: what was seen, with its numbers, and no more.

    With a target the time to it decides; else rows a second (all trials train on the same rows), among those whose final
    metric is not worse. They have to beat the better of solo's variants.
    """
    base = measures.better_solo(comparison)
    rivals = _rivals(comparison, base)
    said = _said(comparison, base, rivals)
    return f"On the simulated cluster: {said[0].lower()}{said[1:]}" if comparison.simulated else said


def _said(comparison: Comparison, base: str, rivals: list[_Rival]) -> str:
    if all(variant.solo for variant in comparison.variants):
        return _only_solo(comparison)
    if comparison.repeats < LEAST_PAIRS:
        return _too_few(comparison, base, rivals)
    if comparison.target is not None and (reach := _who_reaches(comparison, base)):
        return reach
    fit = [rival for rival in rivals if rival.faster and (comparison.target is not None or not rival.worse)]
    lossy = [rival for rival in rivals if rival.faster and rival not in fit]
    if not fit:
        return _stay(comparison, base, rivals, lossy)
    best = fit[0]
    to_it = f" to {comparison.target}" if comparison.target is not None else ""
    text = f"Take {best.name}: {best.times:.2f}x as fast{to_it} as {_called(base)} ({' to '.join(best.range())}), {_and_metric(comparison, best, base)}"
    if lossy and lossy[0].times > best.times:
        text += f"; {lossy[0].name} is faster still, {lossy[0].times:.2f}x, but {_loses(comparison, lossy[0], base)}"
    return f"{text}."


# -- who is compared -------------------------------------------------------------------------------------------------


def _rivals(comparison: Comparison, base: str) -> list[_Rival]:
    """All but solo and what failed, the fastest first."""
    others = [variant.name for variant in comparison.variants if not variant.solo]
    rivals = [
        _Rival(
            name,
            measures.faster(comparison, name, base),
            measures.differ(comparison, name, base, comparison.metric, comparison.higher),
        )
        for name in others
        if not comparison.failure(name)
    ]
    return sorted(rivals, key=lambda rival: -rival.times)


def _called(solo: str) -> str:
    """`solo with 2 threads`"""
    return solo.replace(", ", " with ")


# -- sentences -------------------------------------------------------------------------------------------------------


def _only_solo(comparison: Comparison) -> str:
    first = measures.solos(comparison)[0].name
    speed = _Rival(first, *[measures.faster(comparison, first, comparison.reference)] * 2)
    return f"Nothing but one process was tried: {_called(first)} is {speed.times:.2f}x as fast as {_called(comparison.reference)} ({' to '.join(speed.range())})."


def _too_few(comparison: Comparison, base: str, rivals: list[_Rival]) -> str:
    nearest = f" (fastest so far: {rivals[0].name}, {rivals[0].times:.2f}x {_called(base)})" if rivals else ""
    count = "1 repeat" if comparison.repeats == 1 else f"{comparison.repeats} repeats"
    return f"Not decided: {count} cannot tell a difference from chance, {LEAST_PAIRS} can{nearest}."


def _who_reaches(comparison: Comparison, base: str) -> str:
    """Where one process never reached the target: who did; "" where it did at least once."""
    if _reached(comparison, base):
        return ""
    always = {
        variant.name: measures.middle(comparison, variant.name, "target_seconds") or 0.0
        for variant in comparison.variants
        if _reached(comparison, variant.name) == comparison.repeats
    }
    if always:
        best = min(always, key=always.__getitem__)
        return (
            f"Take {best}: it reached {comparison.target} in all {comparison.repeats} repeats, in {always[best]:.3g} s, and "
            f"{_called(base)} in none."
        )
    return f"Not decided: {_called(base)} did not reach {comparison.target}, and none did in every repeat: train longer, or lower the target."


def _reached(comparison: Comparison, name: str) -> int:
    """In so many repeats."""
    return sum(seconds is not None for seconds in measures.numbers(comparison, name, "target_seconds"))


def _stay(comparison: Comparison, base: str, rivals: list[_Rival], lossy: list[_Rival]) -> str:
    solo = "Stay with one process" + ("" if base == comparison.reference else f", with {base.partition(', ')[2]}")
    tried = [variant for variant in comparison.variants if not variant.solo]
    failed = len(tried) - len(rivals)
    if not rivals:
        return f"{solo}: all {len(tried)} others failed." if failed > 1 else f"{solo}: {tried[0].name} failed."
    rest = [rival for rival in rivals if rival not in lossy]
    of = f"of {len(tried)} {'other' if len(tried) == 1 else 'others'}{f' ({failed} failed)' if failed else ''}"
    to_it = f" to {comparison.target}" if comparison.target is not None else ""
    none = f"none is seen to be faster{to_it} than {_called(base)} by more than {100 * comparison.time_margin:g} %"
    nearest = f" (nearest: {rest[0].name}, {_nearest(comparison, rest[0])})" if rest else ""
    if not lossy:
        return f"{solo}: {of} {none}{nearest}."
    worst = (
        f"{lossy[0].name} is {lossy[0].times:.2f}x as fast as {_called(base)}, but {_loses(comparison, lossy[0], base)}"
    )
    more = f", and of the other {len(rest)} {none}{nearest}" if rest else ""
    also = f" ({len(lossy) - 1} more are faster and lose, too)" if len(lossy) > 1 else ""
    return f"{solo}: {worst}{also}{more}."


def _nearest(comparison: Comparison, rival: _Rival) -> str:
    """Its speed; with what leaves open whether it is faster."""
    missed = comparison.repeats - _reached(comparison, rival.name)
    if comparison.target is not None and missed:
        never = "which it never reached" if missed == comparison.repeats else ""
        return never or f"{rival.times:.2f}x, but not there in {missed} of {comparison.repeats} repeats"
    low, high = rival.range()
    return f"{rival.times:.2f}x" + (f", between {low} and {high}" if rival.speed.said == "unclear" else "")


def _and_metric(comparison: Comparison, rival: _Rival, base: str) -> str:
    name = comparison.metric
    values = _values(comparison, rival.name, base)
    return {
        "better": f"and better in {name} {values}",
        "same": f"and the same {name} within {100 * comparison.metric_margin:g} % {values}",
        "unclear": f"and no difference seen in {name} {values}",
        "worse": f"but worse in the final {name} {values}",
    }[rival.metric.said]


def _loses(comparison: Comparison, rival: _Rival, base: str) -> str:
    return f"worse in {comparison.metric} {_values(comparison, rival.name, base)}"


def _values(comparison: Comparison, name: str, base: str) -> str:
    """`(0.981 and 0.982)`: medians, its own first."""
    both = [measures.middle(comparison, one, comparison.metric) for one in (name, base)]
    return f"({' and '.join('not known' if one is None else f'{one:.4g}' for one in both)})"
