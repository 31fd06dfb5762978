"""compare(): the same task under several strategies, alone and on several workers, by measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from manyhands import engines, spec
from manyhands.callbacks.base import Callback
from manyhands.data.feed import check_kind
from manyhands.engines.base import Engine, check_count
from manyhands.engines.cores import usable_cores
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, Unsupported
from manyhands.evidence.advise import advise_comparison
from manyhands.evidence.compare import measures, metric
from manyhands.evidence.compare.comparison import Comparison, Difference, Target
from manyhands.evidence.compare.repeats import Repeating
from manyhands.evidence.compare.significance import HIGHER
from manyhands.evidence.compare.trial import TrialEntry, TrialSetup
from manyhands.evidence.compare.variants import DEFAULT, entries_of, refusals, threads_of
from manyhands.evidence.compare.verdict import compared, verdict
from manyhands.replica.evaluation import higher_is_better
from manyhands.strategies.base import Strategy
from manyhands.task import Task
from manyhands.training.config import check_resources, task_from

__all__ = ["DEFAULT", "compare", "with_findings"]

VALIDATIONS = 20


def compare(
    task: Task | str | None = None,
    *,
    strategies: Iterable[Strategy | str] = DEFAULT,
    workers: Iterable[int] = (1, 2),
    repeats: int = 3,
    target: Target | str | None = None,
    engine: Engine | str = "auto",
    servers: int = 1,
    partitions: Iterable[str] = ("none",),
    device: str = "auto",
    threads_per_worker: int | None = None,
    time_margin: float = 0.05,
    metric_margin: float = 0.01,
    validations: int = VALIDATIONS,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
    progress: Callback | None = None,
    **task_fields: Any,
) -> Comparison:
    """Train a task under several strategies, repeatedly and alternating, and say which is best, and whether it is worth
    it.

    Solo, one process, is always among them: with one thread, and with all cores. In every repeat each variant trains
    once, on the same rows from the same seed (task.seed + repeat), in an order that is drawn anew. docs/compare.md says
    what is measured, and when two variants count as different.

    task, task_fields, servers, device, timeout_s: as `train` takes them.
    strategies: which, besides solo; one that is given twice is two variants, which ought not to differ.
    workers: each strategy runs on each of these numbers above 1, and on 1 only where no other is given.
    partitions: each strategy runs with each of them, see `train`: "none", "fixed".
    repeats: with fewer than 3 nothing is called different.
    target: a metric's value whose time is measured, "test_accuracy=0.97", "test_loss<=1.8"; it is then the metric to
        judge by, else test_accuracy, test_loss or what the task has.
    engine: "auto", local, sim or hosts. Local workers have a process of their own each, solo too.
    threads_per_worker: of the others than solo; default: usable cores // workers.
    time_margin, metric_margin: what counts as a difference: shares, of a time and of solo's metric.
    validations: about so many validations a trial; raise it for a finer time to target, lower it where validation is
        slow.
    say: called with a line before each trial. progress: a callback of every trial, such as mh.Progress().

    A trial that fails does not end the comparison: it is reported, and its variant not tried again. Ctrl-C or
    SIGTERM after at least one whole repeat returns what is complete.

    Raises BadInput (and its kinds) for what cannot be, before any process starts where that can be known;
    ManyhandsError where solo fails; Preempted after SIGTERM in the first repeat.
    """
    if isinstance(strategies, str):
        strategies = spec.split_list(strategies)
    own = task_from(task, task_fields)
    aim = metric.target_of(target)
    counts = _checked(workers, repeats, validations, time_margin, metric_margin)
    metric.check_data(own, aim)
    place = engines.engine_of(engine)
    check_resources(device, threads_per_worker, place)
    if place.capabilities.spmd:
        raise Unsupported(
            f"compare starts the workers of each trial itself, and engine {place.name} does not allow that: call "
            "compare outside of manyhands run and torchrun"
        )
    setting = TrialSetup(
        task=own,
        target=aim,
        servers=servers,
        device=device,
        timeout_s=timeout_s,
        callbacks=() if progress is None else (progress,),
    )
    on_gpu = device != "cpu" and not place.capabilities.simulated and torch.cuda.is_available()
    threads = threads_of(place, on_gpu, usable_cores(), threads_per_worker)
    entries = _possible(
        entries_of(strategies, counts, threads, _partitions(partitions)), setting, place, strategies is DEFAULT, say
    )
    with ExitStack() as stack:
        if isinstance(place, Local) and (isinstance(engine, str) or not place.apart):
            place = stack.enter_context(
                Local(apart=True)
            )  # all workers, a single one too, are forked from one warm server
        found = Repeating(
            setting=setting,
            entries=entries,
            engine=place,
            repeats=repeats,
            validations=validations,
            time_margin=time_margin,
            metric_margin=metric_margin,
            say=say,
        ).run()
    return with_findings(found)


def with_findings(comparison: Comparison) -> Comparison:
    """The same with its differences, decision and advice, as its trials and margins say."""
    names = [variant.name for variant in comparison.variants if variant.name != comparison.reference]
    tried = [name for name in names if not comparison.failure(name) and comparison.of(name)]
    known = replace(comparison, differences={name: _differences(comparison, name) for name in tried})
    seen = compared(known)
    decision = seen.decision
    return replace(
        known,
        decision=decision.kind,
        best=decision.best.name if decision.best else None,
        verdict=verdict(known, seen),
        advice=tuple(advise_comparison(seen)),
    )


def _differences(comparison: Comparison, name: str) -> tuple[Difference, ...]:
    """Differences from the reference: rows/s, seconds, time to target, and every final metric with a direction."""
    ways: dict[str, bool | None] = {
        of: higher for of, higher in HIGHER.items() if of != "target_seconds" or comparison.target is not None
    }
    ways |= {of: higher_is_better(of) for of in comparison.of(comparison.reference)[0].metrics}
    ways[comparison.metric] = comparison.higher
    if comparison.optimum:
        ways |= {"optimum_distance": False, "excess_loss": False}
    return tuple(
        measures.differ(comparison, name, comparison.reference, of, higher)
        for of, higher in ways.items()
        if higher is not None
    )


# -- what is asked for ----------------------------------------------------------------------------------------------


def _checked(
    workers: Iterable[int], repeats: int, validations: int, time_margin: float, metric_margin: float
) -> Sequence[int]:
    if isinstance(workers, int | str):
        raise BadInput(f"workers must be several numbers, such as (1, 2, 4), not {workers!r}")
    counts = list(workers)
    if not counts:
        raise BadInput("workers must be at least one number, such as (1, 2, 4)")
    for count in counts:
        check_count("workers", count)
    check_count("repeats", repeats)
    check_count("validations", validations)
    for name, margin in (("time_margin", time_margin), ("metric_margin", metric_margin)):
        if not (margin >= 0 and math.isfinite(margin)):
            raise BadInput(f"{name} must be a share of at least 0, such as 0.05, not {margin!r}")
    return counts


def _partitions(given: Iterable[str]) -> list[str]:
    kinds = [given] if isinstance(given, str) else list(dict.fromkeys(given))
    if not kinds:
        raise BadInput('partitions must be at least one of "none" and "fixed"')
    for kind in kinds:
        check_kind(kind)
    return kinds


def _possible(
    entries: list[TrialEntry], setting: TrialSetup, engine: Engine, is_default: bool, say: Callable[[str], None]
) -> list[TrialEntry]:
    """The variants that can be. Raises BadInput naming all that cannot, unless nobody asked for them."""
    refused = refusals(entries, setting, engine)
    if refused and not is_default:
        raise BadInput(
            "some variants cannot be compared. " + " ".join(f"{name}: {why}." for name, why in refused.items())
        )
    for name, why in refused.items():
        say(f"left out: {name}: {why}")
    possible = [entry for entry in entries if entry.variant.name not in refused]
    if len(possible) < 2:
        raise BadInput("nothing to compare solo with: give strategies, such as allreduce,local-sgd:period=8")
    return possible
