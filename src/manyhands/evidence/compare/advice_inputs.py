"""What the decision and the rules of advice see of a comparison. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from manyhands.evidence.advise import Compared, Contestant, Ratio, RunMeasurements, of_task
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
        server=any(trial.staleness for trial in trials),
        one_host=comparison.machine.get("engine") == "local",
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
    )
