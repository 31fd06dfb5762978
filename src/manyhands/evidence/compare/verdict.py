"""A comparison's decision (evidence/advise/compared.py) as a sentence or two with numbers."""

from __future__ import annotations

from collections.abc import Callable

from manyhands import units
from manyhands.evidence.advise import VARIES, Compared, Contestant
from manyhands.evidence.compare import measures
from manyhands.evidence.compare.advising import compared
from manyhands.evidence.compare.comparison import Comparison
from manyhands.evidence.compare.significance import LEAST_PAIRS


def verdict(comparison: Comparison) -> str:
    """Whether to distribute, and how: what was seen, with its numbers, and no more; and whether the reference itself
    varies by half.

    With a target the time to it decides; else rows a second (all trials train on the same rows), among those whose
    final metric is not worse. They have to beat the better of solo's variants.
    """
    seen = compared(comparison)
    only_solo = all(variant.solo for variant in comparison.variants)
    sentence = _only_solo(comparison) if only_solo else SENTENCES[seen.decision.why](comparison, seen)
    if comparison.simulated:
        sentence = f"On the simulated cluster: {sentence[0].lower()}{sentence[1:]}"
    return f"{sentence}{_varies(comparison, seen)}"


# -- a sentence for each reason of a decision -----------------------------------------------------------------------------


def _faster(comparison: Comparison, c: Compared) -> str:
    best, lossy = c.decision.best, _lossy(c)
    assert best is not None
    assert best.speed is not None
    low, high = best.speed.low, best.speed.high
    text = (
        f"Take {best.name}: {best.times:.2f}x as fast{_to_it(comparison)} as {_called(c)} ({low:.2f}x to {high:.2f}x), "
        f"{_and_metric(comparison, c, best)}"
    )
    if lossy and lossy[0].times > best.times:
        text += f"; {lossy[0].name} is faster still, {lossy[0].times:.2f}x, but {_loses(comparison, c, lossy[0])}"
    return f"{text}."


def _reached(comparison: Comparison, c: Compared) -> str:
    best = c.decision.best
    assert best is not None
    take = "Take" if best in c.rivals else "Stay with one process,"
    return (
        f"{take} {best.name}: it reached {comparison.target} in all {comparison.repeats} repeats, in {best.target_s:.3g} s, and "
        f"{_called(c)} in none."
    )


def _unclear(comparison: Comparison, c: Compared) -> str:
    best = c.decision.best
    assert best is not None
    assert best.speed is not None
    between = f"between {best.speed.low:.2f}x and {best.speed.high:.2f}x"
    return f"Not decided: {best.name} is {best.times:.2f}x as fast{_to_it(comparison)} as {_called(c)}, {between}."


def _too_few(comparison: Comparison, c: Compared) -> str:
    best = c.decision.best
    nearest = f" (fastest so far: {best.name}, {best.times:.2f}x {_called(c)})" if best and best.times else ""
    count = units.count(comparison.repeats, "repeat")
    return f"Not decided: {count} cannot tell a difference from chance, {LEAST_PAIRS} can{nearest}."


def _unreached(comparison: Comparison, c: Compared) -> str:
    return (
        f"Not decided: {_called(c)} did not reach {comparison.target} {_in_some(comparison, c.base)}, so that times to it cannot be "
        "compared: train longer, or lower the target."
    )


def _stay(comparison: Comparison, c: Compared) -> str:
    tried, failed = _tried(comparison)
    best, lossy = c.decision.best, _lossy(c)
    rest = len(c.rivals) - len(lossy)
    of = f"of {tried} {'other' if tried == 1 else 'others'}{f' ({failed} failed)' if failed else ''}"
    none = f"none was significantly faster{_to_it(comparison)} than {_called(c)} by more than {100 * comparison.time_margin:g} %"
    nearest = f" (nearest: {best.name}, {_nearest(comparison, best)})" if best else ""
    if not lossy:
        slower = f"{of} {none}{nearest}" if rest else f"{of} all are worse in {comparison.metric}"
        return f"{_alone(comparison, c)}: {slower}."
    worst = f"{lossy[0].name} is {lossy[0].times:.2f}x as fast as {_called(c)}, but {_loses(comparison, c, lossy[0])}"
    more = f", and of the other {rest} {none}{nearest}" if rest else ""
    also = f" ({len(lossy) - 1} more are faster and lose, too)" if len(lossy) > 1 else ""
    return f"{_alone(comparison, c)}: {worst}{also}{more}."


def _all_failed(comparison: Comparison, c: Compared) -> str:
    tried, _ = _tried(comparison)
    first = next(variant.name for variant in comparison.variants if not variant.solo)
    return f"{_alone(comparison, c)}: {f'all {tried} others' if tried > 1 else first} failed."


SENTENCES: dict[str, Callable[[Comparison, Compared], str]] = {
    "faster": _faster,
    "reached": _reached,
    "unclear": _unclear,
    "repeats": _too_few,
    "unreached": _unreached,
    "slower": _stay,
    "worse": _stay,
    "failed": _all_failed,
}


def _only_solo(comparison: Comparison) -> str:
    first, reference = comparison.solos[0].name, comparison.reference
    alone = f"Nothing but one process was tried: {_as_words(first)}"
    ratio = measures.speed_up(comparison, first, reference)
    if ratio is None or first == reference:
        return f"{alone}."
    return f"{alone} is {ratio.middle:.2f}x as fast as {_as_words(reference)}."


# -- their parts -------------------------------------------------------------------------------------------------------


def _varies(comparison: Comparison, c: Compared) -> str:
    """A warning where the variant to beat, or the reference, varies by half from repeat to repeat."""
    noisy = [
        one.name for one in c.contestants if one.name in (c.reference, comparison.reference) and one.varies >= VARIES
    ]
    if not noisy:
        return ""
    name = c.reference if c.reference in noisy else noisy[0]
    known = [value for value in measures.numbers(comparison, name, comparison.speed_of) if value is not None]
    unit = "rows/s" if comparison.target is None else f"s to {comparison.target}"
    called = _as_words(name)
    again = "with more --repeats" if comparison.simulated else "on an idle machine"
    return (
        f" {called[0].upper()}{called[1:]} itself varies from {units.number(min(known))} to {units.number(max(known))} {unit} between "
        f"repeats, so that ratios to it say little: compare again {again}."
    )


def _tried(comparison: Comparison) -> tuple[int, int]:
    """(others than solo, how many of them failed)"""
    others = [variant.name for variant in comparison.variants if not variant.solo]
    return len(others), sum(bool(comparison.failure(name)) for name in others)


def _lossy(c: Compared) -> list[Contestant]:
    """Those that are faster, and lose too much of the metric."""
    return [one for one in c.rivals if one.outcome == "better" and one not in c.fit]


def _as_words(solo: str) -> str:
    """`solo with 2 threads`"""
    return solo.replace(", ", " with ")


def _called(c: Compared) -> str:
    return _as_words(c.reference)


def _alone(comparison: Comparison, c: Compared) -> str:
    fewer = "" if c.reference == comparison.reference else f", with {c.reference.partition(', ')[2]}"
    return f"Stay with one process{fewer}"


def _to_it(comparison: Comparison) -> str:
    return f" to {comparison.target}" if comparison.target is not None else ""


def _in_some(comparison: Comparison, one: Contestant) -> str:
    missed = comparison.repeats - round((one.reached or 0.0) * comparison.repeats)
    return f"in {missed} of {units.count(comparison.repeats, 'repeat')}"


def _nearest(comparison: Comparison, one: Contestant) -> str:
    """Its speed; with what leaves open whether it is faster."""
    if one.reached == 0:
        return "which it never reached"
    if one.speed is None:
        return f"not there {_in_some(comparison, one)}" if comparison.target is not None else "its speed is not known"
    between = f", between {one.speed.low:.2f}x and {one.speed.high:.2f}x" if one.outcome == "unclear" else ""
    return f"{one.times:.2f}x{between}"


def _and_metric(comparison: Comparison, c: Compared, one: Contestant) -> str:
    name, values = comparison.metric, _values(comparison, c, one)
    return {
        "better": f"and better in {name} {values}",
        "same": f"and the same {name} within {100 * comparison.metric_margin:g} % {values}",
        "unclear": f"and no difference seen in {name} {values}",
        "worse": f"but worse in the final {name} {values}",
    }[one.quality]


def _loses(comparison: Comparison, c: Compared, one: Contestant) -> str:
    return f"worse in {comparison.metric} {_values(comparison, c, one)}"


def _values(comparison: Comparison, c: Compared, one: Contestant) -> str:
    """`(0.981 and 0.982)`: means, its own first."""
    both = [measures.middle(comparison, name, comparison.metric) for name in (one.name, c.reference)]
    return f"({' and '.join('not known' if value is None else f'{value:.4g}' for value in both)})"
