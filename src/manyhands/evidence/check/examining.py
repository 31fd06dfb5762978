"""What may keep N workers of this task from equalling one: seen on one batch in this process, and what would take it away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.evidence.check import source_locations
from manyhands.evidence.check.batches import BatchMeasurement, Subject
from manyhands.evidence.check.building import listed
from manyhands.evidence.check.copies import Copies
from manyhands.evidence.check.findings import BREAKS, NOTE, Finding, SourceLocation
from manyhands.evidence.check.function_mode import Seen
from manyhands.evidence.check.interventions import BATCH_NORM, DROPOUT, IN_PLACE, RANDOMNESS
from manyhands.evidence.check.operations import OperationLog, OperationRecord, first_change
from manyhands.evidence.check.rank_access import rank_reads
from manyhands.evidence.check.trial_config import BUFFERS, REBUILT, WORKERS

SETTLED = frozenset([BATCH_NORM, DROPOUT, RANDOMNESS, IN_PLACE])
"""Without these a pass depends on parameters and rows alone, if nothing else is hidden."""

SCHEDULED = 1000
"""Steps that a schedule is told when it is only looked at."""

_TEXTS = {
    BATCH_NORM: "{named}rows are normalized by the mean and variance of all that are there. Each worker normalizes "
    "its slice by itself, so the statistics, and the gradient with them, are those of b/N rows and not of b; running "
    "statistics are averaged over the workers for evaluation. Group norm or layer norm treat each row apart and are "
    "equal. Or accept it: training works, with the batch-norm of a smaller batch.",
    DROPOUT: "{named}numbers are dropped at random, and each worker draws masks of its own, as it must, or all slices "
    "would be dropped alike. So N workers equal one in distribution only, not step by step. There is nothing to do; "
    "with p=0 they are equal.",
    RANDOMNESS: "With another seed the loss is another by {far:.1e}, without any dropout: model or loss draw random "
    "numbers (from {drawn}), and each worker draws its own. N workers equal one in distribution only. If all are "
    "meant to draw alike, seed a generator by the step.",
    IN_PLACE: "Calling the loss changes {names} without an optimizer step. A worker without rows in a step does not "
    "call it, micro-batches call it more often, and replicas drift apart for good, because parameters are never "
    "exchanged again. Change parameters in the optimizer, or in a schedule; or compute with a changed copy "
    "(torch.nn.utils.parametrize).",
    BUFFERS: "Each forward pass writes to {names}, and later passes read it. Each worker has its own, written in its own slices, and "
    "not in a step in which it has no rows; they are averaged for evaluation and for the result only. Make it depend on "
    "parameters alone, or accept it.",
    "hidden-state": "Two calls with the same rows, parameters and seeds differ by {far:.1e}: model or loss keep "
    "something between calls that is neither parameter nor buffer (a counter, a running mean, a generator of its "
    "own). Each worker keeps its own, of its own rows. Register it as a buffer, or make it depend on the step alone.",
    "nondeterministic-operator": "Two calls with the same rows, parameters and seeds differ by {far:.1e}, and so do "
    "two equal copies of the task: {name} gives other bits each time (memory that nothing filled, the time, a "
    "generator without a seed). No two runs are the same then, on any number of workers.",
    WORKERS: "Model, loss, optimizer or schedule ask which worker this is, or how many there are, and once every "
    "worker is told that it is alone they are equal. The batch size is global, and gradients are averaged: nothing "
    "needs to be scaled by the number of workers.",
    "not-rebuilt": "Two models that model() built under the same seed have the same parameters and buffers and give "
    "other losses: something else in them is random, and not drawn from the generators that the seed sets. Each "
    "worker has another. Register it as a buffer, or draw it from torch's generator.",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A finding to be, and how to try it."""

    finding: Finding
    remedy: str = ""
    """What takes it away (arranging.REMEDIES); "" where nothing does: it was seen, and that is all."""

    @property
    def kind(self) -> str:
        return self.finding.kind


def suspect(kind: str, remedy: str, text: str, where: Iterable[SourceLocation | None], **numbers: Any) -> Suspect:
    """One that breaks equality."""
    found = tuple(dict.fromkeys(place for place in where if place is not None))
    return Suspect(finding=Finding(kind=kind, severity=BREAKS, text=text, places=found, numbers=numbers), remedy=remedy)


@dataclass
class Examination:
    """One batch. Every method may raise what the user's code raises."""

    copies: Copies
    double: bool
    batch: Any
    suspects: list[Suspect] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    """Questions that could not be answered, and why."""

    def __post_init__(self) -> None:
        self.task = self.copies.fresh()
        self.subject = Subject(self.task, self.double)
        self.forgetful = True  # nothing but parameters and buffers carries over from one pass to the next
        self.reproducible = True  # equal copies give the same bits
        self.first: BatchMeasurement | None = None  # the plain pass

    def run(self) -> None:
        """Fill `suspects`, `notes`, `held` and `unjudged`."""
        first = self.first = self.subject.measure(self.batch, look=True)
        self._repeat()
        self._by_function(first, BATCH_NORM)
        self._by_function(first, DROPOUT)
        if self.reproducible:
            self._randomness(first)
        self._in_place(first)
        self._buffers(first)
        self._workers()

    @property
    def settles(self) -> bool:
        """Whether a pass without what `SETTLED` names depends on rows and parameters alone."""
        random = any(one.kind == RANDOMNESS for one in self.suspects)
        return self.reproducible and not (random and self.drawn)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Of numpy's and Python's generators those that the plain pass draws from: a trial cannot put another draw in their place."""
        assert self.first is not None
        return tuple(name for name in self.first.moved if name in ("numpy", "python"))

    @property
    def finite(self) -> bool:
        """Whether the plain pass gave numbers."""
        assert self.first is not None
        return math.isfinite(self.first.loss) and bool(self.first.gradient.isfinite().all())

    def settled(self, rows: Any, **options: Any) -> BatchMeasurement:
        """A pass without what `SETTLED` names."""
        return self._clean().measure(rows, without=SETTLED, **options)

    def loss_place(self) -> SourceLocation | None:
        return source_locations.of_function(self.task.loss)

    def add(
        self, kind: str, remedy: str, where: Iterable[SourceLocation | None], text: str = "", **numbers: Any
    ) -> None:
        """A suspect; the text's names are the numbers'."""
        self.suspects.append(suspect(kind, remedy, text or _TEXTS[kind].format(**numbers), where, **numbers))

    def _another(self) -> Subject:
        return Subject(self.copies.fresh(), self.double)

    def _clean(self) -> Subject:
        """Another one, where passes leave something behind."""
        return self.subject if self.forgetful else self._another()

    # -- the same twice ----------------------------------------------------------------------------------------------

    def _repeat(self) -> None:
        one, again = self.settled(self.batch), self.settled(self.batch)
        operator = self._not_deterministic()
        if one.same_as(again):
            self._compare_copies(one)
            if operator is not None:
                self.notes.append(_operator_note(*operator))
            return
        self.forgetful = False
        fresh = self.settled(self.batch), self.settled(self.batch)
        self.reproducible = fresh[0].same_as(fresh[1])
        changed = self._first_change()
        at = self.loss_place() if changed is None or changed.place is None else changed.place
        far = one.far_from(again)
        if self.reproducible:
            self.add("hidden-state", "", [at], far=far)
            return
        name, at = operator or (changed.function if changed is not None else "something", at)
        self.add("nondeterministic-operator", "", [at], far=far, name=name)

    def _compare_copies(self, one: BatchMeasurement) -> None:
        """A model may hold more than parameters and buffers, and that may be another each time it is built."""
        other = self._another()
        pairs = zip(self.subject.model.parameters(), other.model.parameters(), strict=True)
        if one.same_as(other.measure(self.batch, without=SETTLED)):
            self.held.append("the same inputs give the same bits twice")
        elif all(torch.equal(p, q) for p, q in pairs):
            self.add("not-rebuilt", REBUILT, [source_locations.of_function(self.task.model)])

    def _first_change(self) -> OperationRecord | None:
        """In two passes after each other."""
        journals = OperationLog(1), OperationLog(1)
        for journal in journals:
            self.subject.measure(self.batch, without=SETTLED, after=journal.after)
        return first_change(*journals)

    def _not_deterministic(self) -> tuple[str, SourceLocation | None] | None:
        """(operator, where) that torch knows to be not deterministic."""
        with _deterministic_algorithms():
            try:
                self._another().measure(self.batch, without=SETTLED)
            except RuntimeError as error:
                if "deterministic" not in str(error):
                    raise
                return str(error).split(" does not have")[0], source_locations.of_error(error)
        return None

    # -- what was seen -----------------------------------------------------------------------------------------------

    def _by_function(self, first: BatchMeasurement, kind: str) -> None:
        seen = [one for one in first.seen if one.kind == kind]
        if seen:
            found = list(dict.fromkeys(place for one in seen if (place := self._place_of(one)) is not None))
            names = [place.name for place in found if place.name]
            self.add(kind, kind, _by_line(found), named=f"In module {listed(names)} " if names else "")

    def _place_of(self, seen: Seen) -> SourceLocation | None:
        """Where the layer is made, if one of torch's own called it; else the call."""
        name = self.subject.name_of(seen.module) if seen.module is not None else ""
        if name and type(seen.module).__module__.startswith("torch."):
            at = source_locations.of_module(self.subject.model, name, self.task.model)
            if at is not None:
                return at
        return None if seen.place is None else SourceLocation(seen.place.file, seen.place.line, name)

    def _randomness(self, first: BatchMeasurement) -> None:
        """Whether the seed matters beyond dropout."""
        journals, dropout = (OperationLog(1), OperationLog(1)), frozenset([DROPOUT])
        one, other = (
            self._clean().measure(self.batch, without=dropout, seed=seed, after=journal.after)
            for seed, journal in enumerate(journals, start=1)
        )
        if one.same_as(other):
            return
        seen = [call.place for call in first.seen if call.kind == RANDOMNESS]
        changed = first_change(*journals)
        where = seen or [self.loss_place() if changed is None else changed.place]
        drawn = ", ".join(first.moved) or "a generator of their own"
        self.add(RANDOMNESS, RANDOMNESS, where, far=one.far_from(other), drawn=drawn)

    def _in_place(self, first: BatchMeasurement) -> None:
        if first.changed:
            seen = [one.place for one in first.seen if one.kind == IN_PLACE]
            self.add(IN_PLACE, IN_PLACE, seen or [self.loss_place()], names=listed(first.changed))

    def _buffers(self, first: BatchMeasurement) -> None:
        """Those that batch-norm keeps belong to it."""
        modules = dict(self.subject.model.named_modules())
        owners = {name: modules[name.rpartition(".")[0]] for name in first.buffers}
        names = [name for name, owner in owners.items() if not isinstance(owner, _BatchNorm)]
        if names:
            where = [self._forward_of(name.rpartition(".")[0]) for name in names]
            self.add(BUFFERS, BUFFERS, where, names=listed(names))

    def _forward_of(self, name: str) -> SourceLocation | None:
        """The line in a module's forward that changes it; if it is none of the user's, where it is made, or the model."""
        own = source_locations.of_change(self.subject.model.get_submodule(name), "forward")
        made = source_locations.of_module(self.subject.model, name, self.task.model) if name else None
        return own or made or source_locations.of_function(self.task.model)

    def _workers(self) -> None:
        """Whether anything asks which worker this is."""
        with rank_reads() as lines:
            subject = self._another()
            subject.measure(self.batch, without=SETTLED)
            optimizer = self.task.optimizer(subject.model)
            if self.task.schedule is not None:
                self.task.schedule(optimizer, SCHEDULED)
        if lines:
            self.add(WORKERS, WORKERS, lines)


def _by_line(found: list[SourceLocation]) -> list[SourceLocation]:
    """One for each line, with the names of all that are there."""
    lines: dict[tuple[str, int], list[str]] = {}
    for place in found:
        lines.setdefault((place.file, place.line), []).append(place.name)
    return [
        SourceLocation(file, line, listed([name for name in names if name])) for (file, line), names in lines.items()
    ]


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _operator_note(name: str, place: SourceLocation | None) -> Finding:
    return Finding(
        kind="nondeterministic-operator",
        severity=NOTE,
        text=f"torch does not promise that {name} gives the same bits twice; here it did. Where it does not, the same seed gives another run.",
        places=() if place is None else (place,),
        numbers={"name": name},
    )
