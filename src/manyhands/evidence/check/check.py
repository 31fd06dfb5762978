"""`check`: prove on a task of the user's own that N workers of allreduce equal one, or name what keeps them apart.

The proof runs the code that trains: the same loop, replica, strategy and exchange as in every run, first with one
worker, then with N. After each step the loss, the mean gradient and the parameters are compared. Workers are processes,
as in training: each has its own copy of the task, its own generators and modules, and the exchange goes through shared
memory. Simulated workers (engine `sim`) take turns in this process and start faster; causes are tried on them. If a
task cannot be sent to processes, simulated workers make the proof, and the report says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from manyhands import engines, rng
from manyhands.data.batch import first_rows
from manyhands.data.source import Indexed
from manyhands.engines.base import Engine
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.errors import BadInput, ManyhandsError, Unsupported, WorkerFailed, is_whole
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.copies import (
    SLICES,
    SUMMED,
    WORKERS,
    TrialConfig,
    configured,
    copies_of,
    errors_located,
    with_materialized_data,
)
from manyhands.evidence.check.diagnosis import PROVEN_ELSEWHERE, Ablation, Attribution
from manyhands.evidence.check.examination import Subject
from manyhands.evidence.check.inspection import Inspection
from manyhands.evidence.check.interventions import BATCH_NORM, eager
from manyhands.evidence.check.report import BREAKS, NOTE, Checked, EqualityProof, Finding, Results, Suspect, finding
from manyhands.evidence.check.rows import TrainingData, feed_of, read, source_of
from manyhands.evidence.check.trials import Trace, TrialRunner, step_differences, with_solo_rates
from manyhands.own_loop.batches import WHOLE
from manyhands.strategies.allreduce import AllReduce
from manyhands.task import Task, check_differentiable
from manyhands.training.config import TrainConfig, task_from
from manyhands.training.plan import global_batch
from manyhands.units import count, size

__all__ = ["Checked", "check"]

STEPS = 8
LIMIT = 1e-10
"""Relative differences up to this are rounding, in float64; in another dtype the limit is the root of its epsilon."""
MEMORY_BYTES = 1 << 30  # For the recorded vectors of all steps. Proofs of large models take fewer steps.
LEAST_BATCHES = 3  # In an epoch of a proof. With fewer, all steps would see the same rows.
FULL_BATCHES = 2  # in an epoch with an uneven last batch
_OF_SLICES = frozenset([BATCH_NORM, SLICES, SUMMED])
"""What a worker's own rows make: with whole batches it has all."""
_NOTED = frozenset(["data-order", "random-rows", "hidden-state", "nondeterministic-operator", "depends-on-workers"])
"""Suspects that become notes where N workers equal one. Others are dropped then."""


def check(
    task: Task | str | None = None,
    *,
    workers: int = 2,
    steps: int = STEPS,
    engine: Engine | str = "local",
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
    **task_fields: Any,
) -> Checked:
    """Prove that N workers of allreduce equal one on this task, step by step, or find out what keeps them apart.

    There are two proofs, in float64: one with the task's own batch size (smaller if rows are few), and one with batches
    that do not divide and a last batch of a single row, where the data allows it. If a proof fails, trials remove all
    possible causes, and then all but one: the difference that remains is what that cause makes. Also checked: rows are
    handed out once, slices are cut from what one worker reads, everything can be sent to processes, model() builds the
    same from the seed, loss and metrics are means, the optimizer holds the model's parameters.

    The caller's task, model and random state do not change: everything runs on copies, on the CPU.

    task, task_fields: as in `train`. workers: at least 2. steps: of each proof. engine: local (processes), or sim
    (turns in this process). timeout_s: a worker process without progress fails after this time. say: called with a
    line about each stage.

    Raises BadInput for invalid arguments, and whatever training with one worker raises.
    """
    started = time.monotonic()
    own, found_engine = task_from(task, task_fields), engines.engine_of(engine)
    check_differentiable(own, "check")
    if not (found_engine.capabilities.one_host or found_engine.capabilities.simulated):
        raise Unsupported(
            f"check runs its workers on this machine, and engine {found_engine.name} cannot do that: use engine local "
            "or sim, outside of manyhands run and torchrun"
        )
    if own.executor is not None:
        raise Unsupported(
            "check compares the gradients of autograd, and this task has an executor of its own, which may have none: "
            "compare its parameters on one worker and on several"
        )
    together = own.batches == WHOLE or own.sync_batch_norm
    if together and found_engine.capabilities.simulated:
        raise Unsupported(
            f"check runs workers that compute a batch together, and on engine {found_engine.name} they cannot: use engine local"
        )
    for name, value, least in (("workers", workers, 2), ("steps", steps, 1)):
        if not is_whole(value, least):
            raise BadInput(f"check: {name} must be a whole number of at least {least}, not {value!r}")
    with ExitStack() as stack:
        stack.enter_context(rng.kept())
        stack.enter_context(eager())
        if isinstance(engine, str) and isinstance(found_engine, Local):
            stack.enter_context(found_engine)  # its processes load while this one copies the task
        say("copying the task, as it is sent to workers")
        sent, unsendable = stack.enter_context(copies_of(own))
        copies = stack.enter_context(with_materialized_data(sent)) if sent.usable else sent
        if not (sent.sendable and sys.platform == "linux"):
            found_engine = Sim()
        how: dict[str, Any] = {
            "engine": found_engine,
            "timeout_s": timeout_s,
            "together": together,
            "whole": own.batches == WHOLE,
        }
        trials = TrialRunner(copies=copies, sent=sent, workers=workers, **how)
        proofs, findings = Proofs(trials, say), list(unsendable)
        held, unjudged = list[str](), list[str]()
        if sent.usable:  # else `unsendable` is all that can be reported
            config = TrainConfig(
                task=copies.fresh(), strategy=AllReduce(), engine=found_engine, workers=workers, directory=None
            )
            config.check(servers=1, nonfinite="raise", max_seconds=None, timeout_s=timeout_s, resume=False)
            proofs.run(steps)
            explained = _explain(proofs)
            findings += [*proofs.results.findings, *explained.findings]
            held, unjudged = explained.held, explained.unjudged
    return Checked(
        task=own.name,
        workers=workers,
        findings=tuple(sorted(findings, key=lambda finding: not finding.breaks)),
        proofs=tuple(proofs.proofs),
        held=tuple(held if unsendable else [*held, "everything can be sent to other processes"]),
        unjudged=tuple(unjudged),
        dtype=proofs.dtype,
        limit=proofs.limit,
        seconds=time.monotonic() - started,
    )


def _explain(proofs: Proofs) -> Results:
    """What there is beyond the findings of the proofs."""
    trials, failed = proofs.trials, proofs.failed
    config, proof = failed or (proofs.configs[0], proofs.proofs[0])
    first = next((step for step in proof.steps if not step.largest <= proofs.limit), None)
    step = 1 if first is None else first.step  # the step in which workers failed is unknown
    data = TrainingData(trials.copies, config, trials.workers)
    inspection = Inspection(trials.copies, trials.sent, data, proofs.double, proofs.say)
    inspection.run(None if failed is None else step, proofs.traces)
    results = inspection.results
    suspects = _merged([*proofs.results.suspects, *results.suspects])
    if trials.whole:
        suspects = [one for one in suspects if one.remedy not in _OF_SLICES]
    if failed is None:
        broken = [one.finding for one in suspects if one.kind in PROVEN_ELSEWHERE]
        notes = [replace(one.finding, severity=NOTE) for one in suspects if one.kind in _NOTED]
        return replace(results, findings=[*results.findings, *broken, *notes])
    proofs.say(f"what makes the difference: {', '.join(one.kind for one in suspects) or 'nothing suspected yet'}")
    adds = any(one.remedy == SUMMED for one in suspects)
    _, model = trials.copies.built()
    failing = replace(config, steps=step, record_rows=False, adds=adds)
    ablation = Ablation(trials, failing, data, model, proofs.limit)
    findings = Attribution(ablation, suspects, proof.largest_up_to(step), proofs.failure).run()
    return replace(results, findings=[*findings, *results.findings])


def _merged(suspects: list[Suspect]) -> list[Suspect]:
    """The first suspect of each kind, with the places of later ones before its own."""
    merged: dict[str, Suspect] = {}
    for one in suspects:
        first = merged.get(one.kind, one)
        places = first.finding.places if first is one else (*one.finding.places, *first.finding.places)
        merged[one.kind] = replace(first, finding=replace(first.finding, places=places))
    return list(merged.values())


# -- the proofs --------------------------------------------------------------------------------------------------------


@dataclass
class Proofs:
    """Runs the proofs of a task and holds their results."""

    trials: TrialRunner
    say: Callable[[str], None]
    configs: list[TrialConfig] = field(default_factory=list)  # of each proof
    proofs: list[EqualityProof] = field(default_factory=list)
    traces: list[list[Trace]] = field(default_factory=list)
    """Of each proof: that of one worker, then of each of N; only the first if workers failed."""
    results: Results = field(default_factory=Results)
    failure: Finding | None = None  # the finding for failed workers, if nothing else explains the failure
    double: bool = True
    dtype: str = "float64"
    limit: float = LIMIT

    def run(self, steps: int) -> None:
        """Run both proofs. Raises what one worker alone raises."""
        own = self.trials.copies.fresh()
        with errors_located("opening the data or building the model"):
            even = self._within_memory(replace(even_batches(own, self.trials.workers, steps), record_rows=True))
        self.say(f"training one worker in float64 (steps: {even.steps})")
        solo, even = self._run_solo(even)
        sums = [loss + float(gradient.sum()) for loss, gradient in zip(solo.losses, solo.gradients, strict=True)]
        last = next((step for step, total in enumerate(sums, start=1) if not abs(total) < float("inf")), None)
        if last is not None:
            text = (
                f"With one worker alone the loss or its gradient is not finite in step {last}: training ends there. "
                'Lower the rate, look at the rows of this step, or leave such steps out (nonfinite="skip").'
            )
            self.results.breaks("not-finite", text, source_locations.of_function(own.loss), step=last)
        self._prove(even, solo)
        uneven = uneven_batches(own, self.trials.workers, even, lambda: self._accepts_one_row(even))
        if uneven is not None:
            self._prove_uneven(uneven)

    @property
    def failed(self) -> tuple[TrialConfig, EqualityProof] | None:
        """The first proof that does not hold."""
        pairs = zip(self.configs, self.proofs, strict=True)
        return next((pair for pair in pairs if not pair[1].largest <= self.limit), None)

    def _within_memory(self, config: TrialConfig) -> TrialConfig:
        """Limit the steps by `MEMORY_BYTES`: one worker and rank 0 record two vectors a step, other ranks one."""
        model = Subject(self.trials.copies.fresh(), config.double).model
        numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
        most = max(1, MEMORY_BYTES // max(1, 8 * numbers * (self.trials.workers + 3)))
        if most >= config.steps:
            return config
        text = (
            f"The model has {count(numbers, 'parameter')}: the proof takes {most} of {config.steps} steps, whose vectors "
            f"fit {size(MEMORY_BYTES)}."
        )
        self.results.note("fewer-steps", text)
        return replace(config, steps=most)

    def _run_solo(self, config: TrialConfig) -> tuple[Trace, TrialConfig]:
        """One worker in float64, else in the model's own dtype."""
        try:
            return self.trials.run_solo(config), config
        except WorkerFailed as error:
            config = replace(config, double=False)
            solo = self.trials.run_solo(config)
            self.double, self.dtype = False, solo.dtype
            self.limit = float(torch.finfo(getattr(torch, solo.dtype)).eps ** 0.5)
            text = (
                f"In float64 the task fails: {_first_line(error)}. So the proof is in {solo.dtype}, with the limit "
                f"{self.limit:.1g} in place of {LIMIT:.1g}: differences below it cannot be distinguished from rounding."
            )
            self.results.note("no-float64", text, source_locations.of_error(error))
            return solo, config

    def _prove(self, config: TrialConfig, solo: Trace) -> None:
        """Run the same steps with N workers and compare."""
        rows = max(solo.rows)
        self.say(f"training {self.trials.workers} workers (steps: {config.steps}, rows of each in a step: {rows})")
        ranks: Sequence[Trace] = ()
        failure = ""
        try:
            ranks = self.trials.run_workers(with_solo_rates(config, solo))
        except ManyhandsError as error:
            failure = _first_line(error)
            place = source_locations.of_error(error) or source_locations.in_text(str(error))
            text = (
                f"One worker alone trains, and N workers fail: {failure}. A worker gets a slice of each batch, sometimes a "
                "single row, in a process of its own."
            )
            self.failure = finding("fails-on-workers", BREAKS, text, place)
        self.configs.append(config)
        self.traces.append([solo, *ranks])
        self.proofs.append(
            EqualityProof(
                engine=self.trials.engine.name,
                batch_size=rows,
                last_rows=None if config.rows is None else min(solo.rows),
                steps=step_differences(solo, ranks) if ranks else (),
                failure=failure,
            )
        )
        if ranks and not self.results.suspects and solo.rates != ranks[0].rates:
            self._suspect_other_rates(solo, ranks[0])

    def _prove_uneven(self, config: TrialConfig) -> None:
        """Compare, unless one worker alone fails on such batches."""
        try:
            solo = self.trials.run_solo(config)
        except WorkerFailed as error:
            text = (
                f"With {config.batch_size} rows a step one worker alone fails ({_first_line(error)}), so slices of "
                "unequal size were not tried. Workers get such slices where a batch does not divide, as at the end of "
                "an epoch."
            )
            self.results.note("uneven-not-tried", text, source_locations.of_error(error))
            return
        self._prove(config, solo)

    def _suspect_other_rates(self, solo: Trace, first: Trace) -> None:
        """The optimizer has other options on N workers."""
        pairs = [
            (step, name, own[name], other.get(name))
            for step, groups in enumerate(zip(solo.rates, first.rates, strict=False), start=1)
            for own, other in zip(*groups, strict=False)
            for name in own
        ]
        step, name, alone, among = next(pair for pair in pairs if pair[2] != pair[3])
        task = self.trials.copies.fresh()
        source = task.optimizer if step == 1 or task.schedule is None else task.schedule
        on_one, on_many = (f"{one:.6g}" if isinstance(one, float) else str(one) for one in (alone, among))
        text = (
            f"In step {step} the optimizer's {name} is {on_one} on one worker and {on_many} on {self.trials.workers}: "
            "optimizer or schedule ask for the number of workers. The batch size is global, and allreduce averages, so "
            "the rate that is right for one worker is right for N. A larger batch may need another rate; give both to "
            "the task."
        )
        numbers = {"step": step, "name": name, "alone": alone, "among": among}
        self.results.suspect(WORKERS, WORKERS, text, source_locations.of_function(source), **numbers)

    def _accepts_one_row(self, config: TrialConfig) -> bool:
        """Whether the loss of a single row is a finite number."""
        batch = read(configured(self.trials.copies.fresh(), config), 1)[0].batch
        try:
            found = Subject(self.trials.copies.fresh(), self.double).measure(first_rows(batch, 1))
        except Exception:  # noqa: BLE001 - the user's code may raise anything on a single row
            return False
        return found.loss == found.loss and bool(found.gradient.isfinite().all())


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")


def even_batches(task: Task, workers: int, steps: int) -> TrialConfig:
    """The task's own batch size, smaller if rows are few. Raises BadInput if the task cannot be trained so."""
    source = source_of(task)
    batch_size = global_batch(task, workers, source.batch_size)
    has_size = task.batch_size is not None or task.batch_size_per_worker is not None or source.batch_size is None
    sized = task.with_fields(batch_size=batch_size) if has_size else task
    feed = feed_of(sized)
    by_epochs = None if feed.ticks is None else feed.ticks * task.epochs
    total = min((n for n in (by_epochs, task.max_steps) if n is not None), default=None)
    if total is None and task.schedule is not None:
        raise BadInput("a schedule needs the number of steps, and a stream has no length: give max_steps")
    if isinstance(source, Indexed) and feed.rows is not None and feed.rows < LEAST_BATCHES * batch_size:
        batch_size = max(workers, feed.rows // LEAST_BATCHES)
    return TrialConfig(
        steps=steps,
        batch_size=batch_size if has_size else None,
        total_steps=None if total is None else max(total, steps),
    )


def uneven_batches(task: Task, workers: int, config: TrialConfig, one_row: Callable[[], bool]) -> TrialConfig | None:
    """A batch size that the workers do not divide and, if rows are numbered, an epoch that ends with a single row.

    one_row: whether the task accepts a single row. None if the data has its own batches and cannot be cut otherwise.
    """
    source = source_of(task)
    own = config.batch_size or source.batch_size
    if own is None:
        return None
    batch_size = next(b for b in (own - 1, own + 1, own - 2, own + 2) if b >= workers and b % workers)
    try:
        rows = feed_of(task.with_fields(batch_size=batch_size)).rows
    except BadInput:
        return None
    uneven = replace(config, batch_size=batch_size)
    if rows is None or not isinstance(source, Indexed):
        return uneven
    if rows <= batch_size or not one_row():
        return uneven
    batches = min(FULL_BATCHES, (rows - 1) // batch_size)
    return replace(uneven, rows=batches * batch_size + 1, total_rows=source.rows)
