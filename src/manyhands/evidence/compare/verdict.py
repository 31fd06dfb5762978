"""What the decision and the rules of advice see of a comparison, and the decision as a sentence or two with numbers.

The decision itself is evidence/advise/comparison_facts.py's. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from manyhands import units
from manyhands.engines import capabilities_of
from manyhands.evidence.advise import VARIES, Compared, Contestant, Ratio, RunMeasurements, largest_loss, of_task
from manyhands.evidence.compare import measures
from manyhands.evidence.compare.comparison import Comparison, Difference, Trial
from manyhands.evidence.compare.significance import HIGHER, LEAST_PAIRS, mean
from manyhands.recording.history import PARTS
from manyhands.strategies import described


def compared(comparison: Comparison) -> Compared:
    """The variants that did not fail, beside the better of solo's."""
    names = [variant.name for variant in comparison.variants]
    target = comparison.target
    base = measures.better_solo(comparison)
    return Compared(
        contestants=tuple(_contestant(comparison, name, base) for name in names if not comparison.failure(name)),
        reference=base,
        metric=comparison.metric,
        speed_of="rows/s" if target is None else f"time to {target}",
        enough=comparison.repeats >= LEAST_PAIRS,
        margin=comparison.time_margin,
    )


def _contestant(comparison: Comparison, name: str, base: str) -> Contestant:
    trials, other = comparison.of(name), name != base
    quality = measures.differ(comparison, name, base, comparison.metric, comparison.higher)
    of = comparison.speed_of
    own, against = measures.numbers(comparison, name, of), measures.numbers(comparison, base, of)
    paired = None not in own and None not in against
    spread = mean(own, geometric=True)
    return Contestant(
        name=name,
        measured=_measured(comparison, name, trials),
        speed=_ratio(measures.faster(comparison, name, base)) if other and paired else None,
        quality=quality.outcome if other else "",
        effective_rate=trials[0].effective_rate,
        batch_size=trials[0].batch_size,
        reached=None if comparison.target is None else sum(one is not None for one in own) / len(own),
        target_s=math.inf if comparison.target is None or spread is None else spread.middle,
        varies=spread.high / spread.low if spread and spread.low > 0 else 1.0,
    )


def _ratio(found: Difference) -> Ratio | None:
    """As fast; a ratio of seconds turned over. None where it is not known."""
    if not 0 < found.middle < math.inf:
        return None
    middle, low, high = found.middle, found.low, found.high
    if not HIGHER[found.of]:
        middle, low, high = 1 / middle, 1 / high, 1 / low if low else math.inf
    return Ratio(middle=middle, low=low, high=high, outcome=found.outcome)


def _measured(comparison: Comparison, name: str, trials: Sequence[Trial]) -> RunMeasurements:
    variant, simulated = comparison.variant(name), bool(comparison.simulated)
    timing = measures.times_of_workers(comparison, name)
    seconds: dict[str, Any] = {f"{part}_s": fmean(one[part] for one in timing) if timing else 0.0 for part in PARTS}
    gains = [trial.gain for trial in trials if trial.gain is not None]
    return RunMeasurements(
        workers=variant.workers,
        threads_per_worker=variant.threads,
        strategy=variant.strategy,
        **described(variant.strategy),
        **of_task(comparison.facts),
        steps=round(fmean(trial.ticks for trial in trials)),
        **seconds,
        period=fmean(max(1.0, trial.steps / trial.rounds) if trial.rounds else 1.0 for trial in trials),
        cores=variant.workers * variant.threads if simulated else int(comparison.machine.get("cores", 1)),
        device=str(comparison.machine.get("device", "cpu")),
        simulated=simulated,
        assumed=simulated and "profile" not in comparison.simulated,
        server=any(trial.staleness for trial in trials),
        one_host=capabilities_of(str(comparison.machine.get("engine", ""))).one_host,
        compute_of_workers_s=[one["compute"] for one in timing],
        sent_bytes=fmean(trial.bytes for trial in trials) / variant.workers,
        parameters=comparison.parameters,
        shapes=comparison.shapes,
        rows_per_step=trials[0].batch_size / variant.workers,
        epoch_steps=comparison.ticks_per_epoch,
        unused=fmean(trial.unused / max(1, trial.rows) for trial in trials),
        rate=trials[0].rate,
        staleness=measures.staleness(comparison, name),
        push_gain=fmean(gains) if gains else None,
        input={name: fmean(trial.input[name] for trial in trials) for name in trials[0].input},
    )


# -- the decision in words --------------------------------------------------------------------------------------------


def verdict(comparison: Comparison, seen: Compared) -> str:
    """Whether to distribute, and how: what was seen, with its numbers, and no more; and whether the reference itself
    varies by half.

    With a target the time to it decides; else rows a second (all trials train on the same rows), among those whose
    final metric is not worse. They have to beat the better of solo's variants.
    """
    only_solo = all(variant.solo for variant in comparison.variants)
    sentence = _only_solo(comparison) if only_solo else SENTENCES[seen.decision.why](comparison, seen)
    if comparison.simulated:
        sentence = f"On the simulated cluster: {sentence[0].lower()}{sentence[1:]}"
    return f"{sentence}{_varies(comparison, seen)}"


# -- a sentence for each reason of a decision -----------------------------------------------------------------------------


def _faster(comparison: Comparison, c: Compared) -> str:
    best, lossy = c.decision.best, _lossy(c)
    assert best is not None
    name = comparison.metric
    quality = {
        "better": f"and better in {name}",
        "same": f"and the same {name} within {units.percent(comparison.metric_margin)}",
        "unclear": f"and no difference seen in {name}",
        "worse": f"but worse in the final {name}",
    }[best.quality]
    text = f"Take {best.name}: {_as_fast(comparison, c, best)}, {quality} {_values(comparison, c, best)}"
    if lossy and lossy[0].times > best.times:
        text += (
            f"; {lossy[0].name} is faster still, {units.times(lossy[0].times)}, but {_loses(comparison, c, lossy[0])}"
        )
    return f"{text}."


def _reached(comparison: Comparison, c: Compared) -> str:
    best = c.decision.best
    assert best is not None
    take = "Take" if best in c.rivals else "Stay with one process,"
    return (
        f"{take} {best.name}: it reached {comparison.target} in all {comparison.repeats} repeats, in "
        f"{units.duration(best.target_s)}, and {_as_words(c.reference)} in none."
    )


def _unclear(comparison: Comparison, c: Compared) -> str:
    best = c.decision.best
    assert best is not None
    return f"Not decided: {best.name} is {_as_fast(comparison, c, best)}; more repeats may tell."


def _too_few(comparison: Comparison, c: Compared) -> str:
    best = c.decision.best
    nearest = ""
    if best and best.times:
        nearest = f" (fastest so far: {best.name}, {units.times(best.times)} {_as_words(c.reference)})"
    count = units.count(comparison.repeats, "repeat")
    return f"Not decided: {count} cannot tell a difference from chance, {LEAST_PAIRS} can{nearest}."


def _unreached(comparison: Comparison, c: Compared) -> str:
    return (
        f"Not decided: {_as_words(c.reference)} did not reach {comparison.target} {_in_some(comparison, c.base)}, so that "
        "times to it cannot be compared: train longer, or lower the target."
    )


def _stay(comparison: Comparison, c: Compared) -> str:
    tried, failed = _tried(comparison)
    best, lossy, base = c.decision.best, _lossy(c), _as_words(c.reference)
    rest = len(c.rivals) - len(lossy)
    none = f"none was significantly faster{_to_it(comparison)} than {base} by more than {units.percent(comparison.time_margin)}"
    if best:
        none += f"; the nearest is {best.name}, {_nearest(comparison, best)}"
    if lossy:
        found = (
            f"{lossy[0].name} is {units.times(lossy[0].times)} as fast as {base}, but {_loses(comparison, c, lossy[0])}"
        )
        found += f" ({len(lossy) - 1} more are faster and lose, too)" if len(lossy) > 1 else ""
        found += f", and of the other {rest} {none}" if rest else ""
    else:
        found = f"of {tried} {'other' if tried == 1 else 'others'}{f' ({failed} failed)' if failed else ''} {none}"
    return f"{_alone(comparison, c)}: {found}.{largest_loss(c)}"


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
    return f"{alone} is {units.times(ratio.middle)} as fast as {_as_words(reference)}."


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


def _alone(comparison: Comparison, c: Compared) -> str:
    fewer = "" if c.reference == comparison.reference else f", with {c.reference.partition(', ')[2]}"
    return f"Stay with one process{fewer}"


def _to_it(comparison: Comparison) -> str:
    return f" to {comparison.target}" if comparison.target is not None else ""


def _as_fast(comparison: Comparison, c: Compared, one: Contestant) -> str:
    return f"{units.times(one.times)} as fast{_to_it(comparison)} as {_as_words(c.reference)}{_interval(one)}"


def _interval(one: Contestant) -> str:
    """` (1.55× to 1.70×)`; "" without bounds, and where both read the same."""
    if one.speed is None or not math.isfinite(one.speed.high):
        return ""
    low, high = units.times(one.speed.low), units.times(one.speed.high)
    return f" ({low} to {high})" if low != high else ""


def _in_some(comparison: Comparison, one: Contestant) -> str:
    missed = comparison.repeats - round((one.reached or 0.0) * comparison.repeats)
    return f"in {missed} of {units.count(comparison.repeats, 'repeat')}"


def _nearest(comparison: Comparison, one: Contestant) -> str:
    """Its speed; with what leaves open whether it is faster."""
    if one.reached == 0:
        return "which it never reached"
    if one.speed is None:
        return f"not there {_in_some(comparison, one)}" if comparison.target is not None else "its speed is not known"
    return units.times(one.times) + (_interval(one) if one.outcome == "unclear" else "")


def _loses(comparison: Comparison, c: Compared, one: Contestant) -> str:
    return f"worse in {comparison.metric} {_values(comparison, c, one)}"


def _values(comparison: Comparison, c: Compared, one: Contestant) -> str:
    """`(0.9810 and 0.9820)`: means, its own first."""
    both = [measures.middle(comparison, name, comparison.metric) for name in (one.name, c.reference)]
    return f"({' and '.join('not known' if value is None else units.metric(value) for value in both)})"
