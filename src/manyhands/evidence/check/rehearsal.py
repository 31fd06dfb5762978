"""Several workers against one on a script that knows of none: some steps, without noise and in float64.

N workers run the script under observation, and one more process runs it alone. All draw the same, and a `FunctionMode`
takes away what rightly differs: dropout, draws, batch statistics. After each step they compare. The script then starts
anew for the run itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from manyhands import rng
from manyhands.comm.group import Group
from manyhands.data.batch import rows_of
from manyhands.data.sharding import slice_of
from manyhands.engines.base import Engine
from manyhands.errors import BadInput
from manyhands.evidence.check.copies import FUNCTIONS
from manyhands.evidence.check.interventions import (
    BATCH_NORM,
    METADATA_FUNCTIONS,
    FunctionCall,
    FunctionMode,
    eager,
    near,
    sums,
    tensors_of,
)
from manyhands.evidence.check.source_locations import running
from manyhands.own_loop.launch import launch, run_as_main
from manyhands.own_loop.observed.script import Observed, StepGroup
from manyhands.own_loop.prepare import session
from manyhands.worker import Worker, as_current, current

LIMIT = 1e-9
"""Relative differences up to this are rounding, in float64."""
_EVERY_OPERATION = 20_000  # of a step that are kept, to find the first one that differs


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a rehearsal found."""

    steps: int  # that were compared
    largest: float  # relative difference of all of them
    difference: str = ""  # in words, with the step; "": none beyond `LIMIT`


def rehearse(
    path: str | Path,
    args: Sequence[str] = (),
    *,
    workers: int,
    steps: int,
    engine: Engine | str = "local",
    observed: Watching = Observed(),  # noqa: B008 - it is frozen
    timeout_s: float = 300.0,
) -> Rehearsed:
    """Compare `workers` workers with one process on the first `steps` optimizer steps of a script.

    Parameters, losses, rates and rows are compared after each step. What the script prints is dropped. observed: what
    watches the script on the workers. Raises what the script raises.
    """
    program = str(path), tuple(args), observed, workers, steps
    found = launch(_rehearse, *program, workers=workers + 1, engine=engine, threads_per_worker=1, timeout_s=timeout_s)
    return Rehearsed(**found[0])


class Watching(Protocol):
    """What watches a script that knows of no workers: `observed.script.Observed`, or `keras.fit.FitOnWorkers`."""

    @property
    def sees_whole(self) -> bool:
        """Whether the script computes with whole batches."""

    def __call__(self, path: str) -> AbstractContextManager[None]:
        """Within, the script that this process runs is one of all workers."""

    def in_float64(self, stepped: Callable[[str, Sequence[StepGroup]], None]) -> AbstractContextManager[None]:
        """Within, the script's numbers are float64, and `stepped` is called after each step of an optimizer: with its kind,
        and its groups of parameters."""


class _Enough(BaseException):
    """All steps are compared: unwinds the script, past its own `except Exception`."""


def _rehearse(path: str, args: Sequence[str], observed: Watching, workers: int, steps: int) -> dict[str, Any]:
    here = current()
    assert here is not None
    alone = here.rank == workers
    group = None if alone else here.make_group(range(workers))
    if group is None:
        worker = Worker(driver=here.driver, threads=here.threads)
    else:
        worker = Worker(rank=here.rank, size=workers, group=group, driver=here.driver, threads=here.threads)
    rng.take_first(here.group)
    whole = observed.sees_whole
    keeps = {BATCH_NORM} if whole else set()  # its statistics are of all workers' rows then
    comparison = StepComparison(here.group, steps, FUNCTIONS - keeps, whole=whole)
    try:
        with ExitStack() as stack:
            stack.enter_context(as_current(worker))
            stack.enter_context(eager())
            if not alone:
                stack.enter_context(observed(path))
            stack.enter_context(comparison.installed())
            stack.enter_context(observed.in_float64(comparison.stepped))
            stack.enter_context(redirect_stdout(open(os.devnull, "w")))  # noqa: SIM115 - as long as the process
            run_as_main(path, args)
            comparison.end()
    except (_Enough, SystemExit):
        pass
    return comparison.found


@dataclass
class StepComparison:
    """What one process knows of the steps, and compares with all others. Rank `size - 1` of the group runs alone."""

    group: Group
    steps: int
    without: frozenset[str] = FUNCTIONS  # what a batch's computation is freed of
    whole: bool = False  # workers see whole batches, and none may look at outputs that the others do not look at
    found: dict[str, Any] = field(default_factory=lambda: {"steps": 0, "largest": 0.0, "difference": ""})
    loss: float = 0.0  # of the newest backward
    rows: int = 0  # of the batches since the newest step
    operations: list[tuple[str, str, Any]] = field(
        default_factory=list
    )  # since the newest batch: (function, where, sums)
    leading: tuple[int, int] = (0, 0)  # (rows of the batch at hand, the first of them whose values are recorded)
    compared_rows: tuple[int, int] = (0, 0)  # of the newest backward's

    @property
    def alone(self) -> bool:
        return self.group.rank == self.group.size - 1

    # -- hooks -------------------------------------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the script computes without noise in float64, and its steps are compared."""
        mode = FunctionMode(double=True, after=self._called, of_script=True)
        plain_iter, plain_backward = DataLoader.__iter__, torch.autograd.backward

        def iterate(loader: DataLoader[Any]) -> Any:
            _seed_by_row(loader.dataset)
            return self._batches(plain_iter(loader), mode) if not _is_own(loader) else plain_iter(loader)

        @wraps(plain_backward)
        def backward(tensors: Any, *given: Any, **named: Any) -> None:
            if self.leading[0]:  # else a second backward of one batch
                self.compared_rows, self.leading = self.leading, (0, 0)  # what comes now has no rows
            plain_backward(tensors, *given, **named)
            first = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
            self.loss = float(first.detach().sum())

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        torch.autograd.backward = backward
        try:
            with mode:
                yield
        finally:
            DataLoader.__iter__ = plain_iter  # type: ignore[method-assign]
            torch.autograd.backward = plain_backward

    def _batches(self, batches: Iterator[Any], mode: FunctionMode) -> Iterator[Any]:
        for batch in batches:
            self._fetched(batch)
            mode.without = self.without
            try:
                yield batch
            finally:
                mode.without = frozenset()

    def _fetched(self, batch: Any) -> None:
        try:
            rows = rows_of(batch)
        except BadInput:
            return  # of evaluation; training needs rows
        start, stop = slice_of(rows, 0, self.group.size - 1)
        self.rows, self.leading = rows, (rows, stop - start if self.alone else rows)
        self.operations.clear()

    def _called(self, call: FunctionCall, result: Any) -> None:
        rows, first = self.leading
        if self.whole or not rows or call.name in METADATA_FUNCTIONS or len(self.operations) >= _EVERY_OPERATION:
            return
        if self.group.rank not in (0, self.group.size - 1):
            return
        with torch.no_grad():
            tensors = [one.detach().double() for one in tensors_of(result) if one.dim() and not one.is_complex()]
            parts = [one[: one.shape[0] // rows * first] for one in tensors if one.numel() and one.shape[0] % rows == 0]
            if parts:
                self.operations.append((call.name, str(running() or ""), sums(parts)))

    # -- steps -------------------------------------------------------------------------------------------------------

    def stepped(self, kind: str, groups: Sequence[StepGroup]) -> None:
        """A collective of all: what has come out of this step of an optimizer of this kind."""
        self.found["steps"] += 1
        rates = [group.rate for group in groups]
        facts = {"loss": self.loss, "rates": rates, "rows": self.rows, "kind": kind}
        everyone = self.group.all_gather_json(facts)
        found = [self._differs_in_facts(everyone)]
        if not any(one["kind"] != everyone[0]["kind"] for one in everyone):
            found.append(self._differs_in_parameters([p for group in groups for p in group.parameters]))
        told = self.group.all_gather_json(", and ".join(filter(None, found)))[0]
        if told:
            self._explain(told)
            raise _Enough
        if self.found["steps"] >= self.steps:
            raise _Enough

    def end(self) -> None:
        """The script is over before all steps were made. A collective."""
        everyone = self.group.all_gather_json({"kind": "", "steps": self.found["steps"]})
        if any(one["kind"] for one in everyone):
            self._explain(self.group.all_gather_json(self._differs_in_facts(everyone))[0])

    def _differs_in_facts(self, everyone: Sequence[dict[str, Any]]) -> str:
        *workers, alone = everyone
        for one in workers[:1]:
            if not one["kind"] or not alone["kind"]:
                longer = "one process" if alone["kind"] else "the workers"
                return f"{longer} made a step more than the other"
            if one["kind"] != alone["kind"]:
                return f"the workers stepped {one['kind']}, and one process {alone['kind']}"
            if one["rates"] != alone["rates"]:
                return f"the rate is {one['rates']}, and in one process {alone['rates']}"
            if alone["rows"] not in (one["rows"], sum(worker["rows"] for worker in workers)):
                shared = ", ".join(str(worker["rows"]) for worker in workers)
                return f"the workers have {shared} rows, and one process {alone['rows']}"
            far = _far(one["loss"], alone["loss"]) if self.whole else 0.0  # a slice has a loss of its own
            self.found["largest"] = max(self.found["largest"], far)
            if far > LIMIT:
                return f"the loss is {one['loss']:.12g}, and in one process {alone['loss']:.12g}"
        return ""

    def _differs_in_parameters(self, parameters: Sequence[Tensor]) -> str:
        """On worker 0; the others know of none."""
        difference = ""
        for name, parameter in zip(self._names(parameters), parameters, strict=True):
            value = parameter.detach().double().reshape(-1)
            theirs = value.clone().contiguous()
            self.group.broadcast_(theirs, self.group.size - 1)
            if self.group.rank or not value.numel():
                continue
            far = float((theirs - value).abs().max()) / max(float(theirs.abs().max()), 1e-300)
            self.found["largest"] = max(self.found["largest"], far)
            if far > LIMIT and not difference:
                difference = f"the parameter {name} is off by {far:.2g} of its largest value"
        return difference

    def _names(self, parameters: Sequence[Tensor]) -> list[str]:
        named = {}
        if not self.alone:
            for pair in session().pairs:
                named.update({id(p): name for name, p in pair.replica.model.named_parameters()})
        return [named.get(id(p), f"{number} (shape {list(p.shape)})") for number, p in enumerate(parameters)]

    def _explain(self, difference: str) -> None:
        """A collective: where rows began to differ."""
        self.found["difference"] = f"after step {self.found['steps']} {difference}"
        everyone = self.group.all_gather_json([*self.compared_rows, self.operations])
        (own_rows, _, own), (_, leading, alone) = everyone[0], everyone[-1]
        if own_rows != leading:  # worker 0 had the whole batch
            return
        for (function, where, values), (other, _, others) in zip(own, alone, strict=False):
            if function != other:
                return
            if not near(values, others, LIMIT):
                place = f" at {where}" if where else ""
                self.found["difference"] += (
                    f". The first operation whose rows differ is {function}{place}: it mixes the rows of a batch"
                )
                return
        if own:
            self.found["difference"] += (
                ". All rows are equal up to the loss, so what differs is how the loss adds them up"
            )


def _far(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-300) if one != other else 0.0


def _is_own(loader: DataLoader[Any]) -> bool:
    """Whether manyhands made it, to load a part of what the script's own loads."""
    return type(loader.dataset).__module__.startswith("manyhands.") and isinstance(loader.dataset, Dataset)


_SEEDED: set[type] = set()


def _seed_by_row(dataset: Any) -> None:
    """From now on what a row draws depends on its number alone, in this process, which ends with the rehearsal."""
    kind = type(dataset)
    if (
        kind in _SEEDED
        or not hasattr(kind, "__getitem__")
        or kind.__module__.startswith(("torch.", "manyhands.", "builtins"))
    ):
        for inner in (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())):
            if inner is not None:
                _seed_by_row(inner)
        return
    _SEEDED.add(kind)
    plain: Callable[[Any, Any], Any] = kind.__getitem__

    @wraps(plain)
    def seeded(self: Any, index: Any) -> Any:
        if not isinstance(index, int):
            return plain(self, index)
        with rng.kept():
            rng.seed_all(rng.mixed((abs(index), 1)))
            return plain(self, index)

    kind.__getitem__ = seeded
