"""What may keep N workers of a task from equalling one: examined on one batch in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from manyhands import rng
from manyhands.data.batch import rows_of
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.copies import (
    BUFFERS,
    FUNCTIONS,
    REBUILT,
    WORKERS,
    Copies,
    TrialConfig,
    batch_in_float64,
    model_for,
    storages_of,
)
from manyhands.evidence.check.interventions import (
    BATCH_NORM,
    DROPOUT,
    IN_PLACE,
    RANDOMNESS,
    FunctionCall,
    FunctionMode,
    OperationLog,
    RecordedCall,
    first_change,
)
from manyhands.evidence.check.report import Results
from manyhands.evidence.check.source_locations import SourceLocation
from manyhands.task import Metrics, Summed, Task
from manyhands.units import listed
from manyhands.worker import Worker, as_current

_SCHEDULE_STEPS = 1000  # passed to a schedule that is only examined

_TEXTS = {
    BATCH_NORM: "{named}rows are normalized by the mean and variance of the rows in the batch. Each worker normalizes "
    "its own slice, so the statistics, and the gradient with them, are those of b/N rows and not of b; running "
    'statistics are averaged over the workers for evaluation. With the task\'s sync_batch_norm=True or batches="whole" '
    "they are those of all rows. Group norm and layer norm treat each row separately. Or accept it: training works, with the batch-norm of a smaller batch.",
    DROPOUT: "{named}numbers are dropped at random. Each worker draws its own masks; otherwise all slices would get the "
    "same mask. So N workers equal one in distribution only, not step by step. There is nothing to do; with p=0 they "
    "are equal.",
    RANDOMNESS: "Without any dropout, another seed changes the loss by {far:.1e}: model or loss draw random numbers "
    "(from {drawn}), and each worker draws its own. N workers equal one in distribution only. If all workers are meant "
    "to draw the same numbers, seed a generator by the step.",
    IN_PLACE: "Calling the loss changes {names} without an optimizer step. A worker without rows in a step does not "
    "call the loss, and micro-batches call it more often. Replicas then drift apart for good, because parameters are "
    "never exchanged again. Change parameters in the optimizer, or in a schedule; or compute with a changed copy "
    "(torch.nn.utils.parametrize).",
    BUFFERS: "Each forward pass writes to {names}, and later passes read it. Each worker has its own copy, written by "
    "its own slices, and not in a step in which it has no rows. Copies are averaged only for evaluation and for the "
    "result. Make it depend on parameters alone, or accept it.",
    "hidden-state": "Two calls with the same rows, parameters and seeds differ by {far:.1e}: model or loss keep "
    "something between calls that is neither parameter nor buffer (a counter, a running mean, a generator of its "
    "own). Each worker keeps its own, of its own rows. Register it as a buffer, or make it depend on the step alone.",
    "nondeterministic-operator": "Two calls with the same rows, parameters and seeds differ by {far:.1e}, and so do "
    "two equal copies of the task: {name} gives other bits each time (uninitialized memory, the time, a generator "
    "without a seed). No two runs are the same then, on any number of workers.",
    WORKERS: "Model, loss, optimizer or schedule ask for the rank or the number of workers. If every worker sees a "
    "group of one, N workers equal one. The batch size is global, and gradients are averaged: nothing needs to be "
    "scaled by the number of workers.",
    "not-rebuilt": "Two models that model() built under the same seed have the same parameters and buffers and give "
    "different losses: something else in them is random, and not drawn from the generators that the seed sets. It "
    "differs on each worker. Register it as a buffer, or draw it from torch's generator.",
}


@dataclass
class Examination:
    """Examines a task on one batch and fills `results`. Every method may raise what the user's code raises."""

    copies: Copies
    double: bool
    batch: Any
    results: Results = field(default_factory=Results)

    def __post_init__(self) -> None:
        self.task = self.copies.fresh()
        self.subject = Subject(self.task, self.double)
        self.stateless = True  # a pass leaves nothing behind but parameters and buffers
        self.reproducible = True  # equal copies give the same bits
        self.first: BatchMeasurement | None = None  # the pass without any intervention

    def run(self) -> None:
        first = self.first = self.subject.measure(self.batch, record=True)
        self._repeat()
        self._by_function(first, BATCH_NORM)
        self._by_function(first, DROPOUT)
        if self.reproducible:
            self._randomness(first)
        self._in_place(first)
        self._buffers(first)
        self._workers()

    @property
    def is_deterministic(self) -> bool:
        """Whether a pass of `measure_repeatable` depends on rows and parameters alone."""
        random = any(one.kind == RANDOMNESS for one in self.results.suspects)
        return self.reproducible and not (random and self.drawn)

    @property
    def drawn(self) -> tuple[str, ...]:
        """The generators of numpy and Python that the first pass draws from. A trial cannot replace their draws."""
        assert self.first is not None
        return tuple(name for name in self.first.drawn_from if name in ("numpy", "python"))

    @property
    def finite(self) -> bool:
        """Whether loss and gradient of the first pass are finite."""
        assert self.first is not None
        return math.isfinite(self.first.loss) and bool(self.first.gradient.isfinite().all())

    def measure_repeatable(self, rows: Any, **options: Any) -> BatchMeasurement:
        """A pass without the causes in `FUNCTIONS`: the same rows give the same bits, unless there is hidden state."""
        return self._stateless_subject().measure(rows, without=FUNCTIONS, **options)

    def loss_place(self) -> SourceLocation | None:
        return source_locations.of_function(self.task.loss)

    def _suspect(self, kind: str, remedy: str, *where: SourceLocation | None, **numbers: Any) -> None:
        """With the text of its kind, in which `numbers` fill the placeholders."""
        text = _TEXTS[kind].format(**numbers)
        self.results.suspect(kind, remedy, text[:1].upper() + text[1:], *where, **numbers)

    def _new_subject(self) -> Subject:
        return Subject(self.copies.fresh(), self.double)

    def _stateless_subject(self) -> Subject:
        return self.subject if self.stateless else self._new_subject()

    def _repeat(self) -> None:
        one, again = self.measure_repeatable(self.batch), self.measure_repeatable(self.batch)
        operator = self._not_deterministic()
        if one.same_as(again):
            self._compare_copies(one)
            if operator is not None:
                name, place = operator
                text = (
                    f"torch does not guarantee that {name} gives the same bits twice; here it did. Where it does not, the "
                    "same seed gives another run."
                )
                self.results.note("nondeterministic-operator", text, place, name=name)
            return
        self.stateless = False
        fresh = self.measure_repeatable(self.batch), self.measure_repeatable(self.batch)
        self.reproducible = fresh[0].same_as(fresh[1])
        logs = OperationLog(1), OperationLog(1)
        for log in logs:
            self.subject.measure(self.batch, without=FUNCTIONS, after=log.after)
        changed = first_change(*logs)
        at = self.loss_place() if changed is None or changed.place is None else changed.place
        far = one.relative_difference(again)
        if self.reproducible:
            self._suspect("hidden-state", "", at, far=far)
            return
        name, at = operator or (changed.function if changed is not None else "something", at)
        self._suspect("nondeterministic-operator", "", at, far=far, name=name)

    def _compare_copies(self, one: BatchMeasurement) -> None:
        """Whether another copy, built from the same seed, gives the same loss."""
        other = self._new_subject()
        pairs = zip(self.subject.model.parameters(), other.model.parameters(), strict=True)
        if one.same_as(other.measure(self.batch, without=FUNCTIONS)):
            self.results.held.append("the same inputs give the same bits twice")
        elif all(torch.equal(p, q) for p, q in pairs):
            self._suspect("not-rebuilt", REBUILT, source_locations.of_function(self.task.model))

    def _not_deterministic(self) -> tuple[str, SourceLocation | None] | None:
        """(operator, where): the first operator that torch lists as nondeterministic."""
        before = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            self._new_subject().measure(self.batch, without=FUNCTIONS)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            return str(error).split(" does not have")[0], source_locations.of_error(error)
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)
        return None

    def _by_function(self, first: BatchMeasurement, kind: str) -> None:
        calls = [one for one in first.recorded if one.kind == kind]
        if not calls:
            return
        kinds = {self.subject.name_of(one.module): type(one.module).__name__ for one in calls if one.module is not None}
        shown = [f"`{name}` ({kind_of})" for name, kind_of in kinds.items() if name]
        modules = f"In {'module' if len(shown) == 1 else 'modules'} {listed(shown)}, " if shown else ""
        lines: dict[tuple[str, int], list[str]] = {}
        for place in dict.fromkeys(self._place_of(one) for one in calls):
            if place is not None:
                lines.setdefault((place.file, place.line), []).append(place.name)
        # one location for each line, with the names of all that is there
        where = [SourceLocation(*line, listed([name for name in own if name])) for line, own in lines.items()]
        self._suspect(kind, kind, *where, named=modules)

    def _place_of(self, call: RecordedCall) -> SourceLocation | None:
        """Where the layer is made if a layer of torch made the call; else the call itself."""
        name = self.subject.name_of(call.module) if call.module is not None else ""
        if name and type(call.module).__module__.startswith("torch."):
            at = source_locations.of_module(self.subject.model, name, self.task.model)
            if at is not None:
                return at
        return None if call.place is None else SourceLocation(call.place.file, call.place.line, name)

    def _randomness(self, first: BatchMeasurement) -> None:
        """Whether the loss depends on the seed without dropout."""
        logs, dropout = (OperationLog(1), OperationLog(1)), frozenset([DROPOUT])
        one, other = (
            self._stateless_subject().measure(self.batch, without=dropout, seed=seed, after=log.after)
            for seed, log in enumerate(logs, start=1)
        )
        if one.same_as(other):
            return
        draws = [call.place for call in first.recorded if call.kind == RANDOMNESS]
        changed = first_change(*logs)
        where = draws or [self.loss_place() if changed is None else changed.place]
        drawn = ", ".join(first.drawn_from) or "a generator of their own"
        self._suspect(RANDOMNESS, RANDOMNESS, *where, far=one.relative_difference(other), drawn=drawn)

    def _in_place(self, first: BatchMeasurement) -> None:
        if first.changed:
            writes = [one.place for one in first.recorded if one.kind == IN_PLACE]
            self._suspect(IN_PLACE, IN_PLACE, *(writes or [self.loss_place()]), names=listed(first.changed))

    def _buffers(self, first: BatchMeasurement) -> None:
        """Whether the pass changes buffers other than batch-norm's."""
        modules = dict(self.subject.model.named_modules())
        owners = {name: modules[name.rpartition(".")[0]] for name in first.buffers}
        names = [name for name, owner in owners.items() if not isinstance(owner, _BatchNorm)]
        if names:
            where = [self._forward_of(name.rpartition(".")[0]) for name in names]
            self._suspect(BUFFERS, BUFFERS, *where, names=listed(names))

    def _forward_of(self, name: str) -> SourceLocation | None:
        """The line in a module's forward that changes the module; else where the module is made, or the model."""
        own = source_locations.of_change(self.subject.model.get_submodule(name), "forward")
        made = source_locations.of_module(self.subject.model, name, self.task.model) if name else None
        return own or made or source_locations.of_function(self.task.model)

    def _workers(self) -> None:
        """Whether anything reads the rank or the number of workers."""
        worker = _RecordingWorker()
        worker.lines = []
        with as_current(worker):
            subject = self._new_subject()
            subject.measure(self.batch, without=FUNCTIONS)
            optimizer = self.task.optimizer(subject.model)
            if self.task.schedule is not None:
                self.task.schedule(optimizer, _SCHEDULE_STEPS)
        if worker.lines:
            self._suspect(WORKERS, WORKERS, *worker.lines)


class _RecordingWorker(Worker):
    """A single worker that records the lines that read its rank or size."""

    lines: list[SourceLocation]

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in ("rank", "size") and "lines" in vars(self):
            place = source_locations.running()
            if place is not None:
                self.lines.append(place)
        return super().__getattribute__(name)


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchMeasurement:
    """One forward and backward pass in training mode, from the initial parameters."""

    loss: float
    weight: float
    gradient: Tensor  # [D]
    recorded: tuple[RecordedCall, ...]
    changed: tuple[str, ...]  # parameters that the pass changed, without any step
    buffers: tuple[str, ...]  # buffers that the pass changed
    drawn_from: tuple[str, ...]  # the generators that the pass drew from: torch, numpy, python

    def same_as(self, other: BatchMeasurement) -> bool:
        """The same bits of loss and gradient; NaN is NaN."""
        losses = self.loss == other.loss or (self.loss != self.loss and other.loss != other.loss)
        return losses and torch.equal(self.gradient.nan_to_num(), other.gradient.nan_to_num())

    def relative_difference(self, other: BatchMeasurement) -> float:
        """The larger relative difference of loss and gradient."""
        gradient = float((self.gradient - other.gradient).abs().max()) / max(float(self.gradient.abs().max()), 1e-300)
        return max(abs(self.loss - other.loss) / max(abs(self.loss), abs(other.loss), 1e-300), gradient)


class Subject:
    """A model and its loss, built from the task's seed. Takes ownership of `task`, a fresh copy."""

    def __init__(self, task: Task, double: bool) -> None:
        self.task, self.double = task, double
        rng.seed_all(task.seed)
        self.model = model_for(task.model, TrialConfig(steps=1, batch_size=None, double=double)).cpu()
        self._parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def measure(
        self,
        batch: Any,
        *,
        without: frozenset[str] = frozenset(),
        seed: int = 0,
        record: bool = False,
        after: Callable[[FunctionCall, Any], None] | None = None,
    ) -> BatchMeasurement:
        """Raises what the user's code raises. `without`, `record`, `after`: see `FunctionMode`."""
        self.restore()
        rng.seed_all(seed)
        before = rng.generator_states()
        guarded = storages_of(self.model)
        with FunctionMode(double=self.double, without=without, guarded=guarded, record=record, after=after) as mode:
            measure = self.task.loss(self.model, batch_in_float64(batch) if self.double else batch)
            mean, weight = measure if isinstance(measure, tuple) else (measure, rows_of(batch))
            drawn_from = tuple(name for name, state in rng.generator_states().items() if state != before[name])
            mean.reshape(()).backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return BatchMeasurement(
            loss=float(mean.detach()),
            weight=float(weight),
            gradient=torch.cat([grad.detach().double().reshape(-1) for grad in grads]),
            recorded=tuple(mode.recorded),
            changed=_changed(self._parameters, dict(self.model.named_parameters())),
            buffers=_changed(self._buffers, dict(self.model.named_buffers())),
            drawn_from=drawn_from,
        )

    def metrics(self, batch: Any) -> dict[str, tuple[float, float]]:
        """{name: (mean, weight)} of `evaluate`, in evaluation mode; without `Summed` metrics, which are exact."""
        measures = self._evaluate(batch, FunctionMode(double=self.double))
        means = {name: one for name, one in measures.items() if not isinstance(one, Summed)}
        pairs = {n: one if isinstance(one, tuple) else (one, rows_of(batch)) for n, one in means.items()}
        return {name: (float(mean), float(weight)) for name, (mean, weight) in pairs.items()}

    def changed_by_metrics(self, batch: Any) -> tuple[tuple[str, ...], tuple[RecordedCall, ...]]:
        """(parameters that `evaluate` changes, recorded calls)"""
        mode = FunctionMode(double=self.double, record=True, guarded=storages_of(self.model))
        self._evaluate(batch, mode)
        return _changed(self._parameters, dict(self.model.named_parameters())), tuple(mode.recorded)

    def _evaluate(self, batch: Any, mode: FunctionMode) -> Metrics:
        self.restore()
        rng.seed_all(0)
        self.model.eval()
        with torch.no_grad(), mode:
            return self.task.metrics(self.model, batch_in_float64(batch) if self.double else batch)

    def restore(self) -> None:
        """Reset parameters and buffers to what was built; training mode, no gradients."""
        self.model.train()
        with torch.no_grad():
            for own, values in (
                (self.model.named_parameters(), self._parameters),
                (self.model.named_buffers(), self._buffers),
            ):
                for name, tensor in own:
                    tensor.copy_(values[name])
                    tensor.grad = None

    def name_of(self, module: Any) -> str:
        """A module's dotted name, as before torch.compile; "" if it is not part of the model."""
        found = next((name for name, own in self.model.named_modules() if own is module), "")
        return found.replace("_orig_mod.", "")


def _changed(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(name for name, value in before.items() if not torch.equal(now[name].detach(), value))
