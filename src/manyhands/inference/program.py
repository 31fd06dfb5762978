"""What each worker does: it runs the model on its batches, measures them, and delivers what comes out, in order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from manyhands.comm.group import Group
from manyhands.data.batch import columns, describe
from manyhands.data.row_batches import pack, to_batch
from manyhands.data.row_pieces import RowPiece
from manyhands.data.source import Source
from manyhands.engines.driver.row_collector import TOTAL
from manyhands.errors import BadInput
from manyhands.inference.deal import Deal, Dealt
from manyhands.replica.evaluation import evaluating
from manyhands.worker import Worker

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_BYTES = 4 << 20
"""A worker delivers what it has when it has so much, or is at the end of a lease."""
Function = Callable[[nn.Module, Any], Any]


class Measurement(Protocol):
    """What some metrics find on a worker's batches."""

    def add(self, model: nn.Module, batch: Any, rows: int) -> None:
        """One batch."""

    def result(self, group: Group) -> dict[str, float]:
        """Of all workers' batches, the same on each; a collective."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of a worker. It returns how many rows it had, and what was measured."""

    model: nn.Module
    deal: Deal
    outputs: Function | None
    """What is delivered of a batch; None: nothing."""
    keep: Sequence[str] = ()
    """Columns of the batches that are delivered beside the outputs."""
    measurements: Sequence[Callable[[], Measurement]] = ()
    spmd: bool = False
    """Whether each rank is its own driver, so that rows go to all ranks by a collective."""

    def __call__(self, worker: Worker) -> dict[str, Any]:
        model = placed(self.model, worker)
        source = self.deal.open()
        if worker.rank == 0 and source.rows is not None:
            worker.emit(TOTAL, rows=source.rows)
        measured = [make() for make in self.measurements]
        done = Done()
        with evaluating(model):
            steps = self._steps(worker, model, source, measured, done)
            if self.spmd:
                _together(worker, steps)
            else:
                for _ in steps:
                    pass
        worker.driver.progress("validation", done.batches)
        metrics = {name: value for one in measured for name, value in one.result(worker.group).items()}
        worker.driver.progress("end", done.batches)
        return {"rows": done.rows, "metrics": metrics}

    def _steps(
        self, worker: Worker, model: nn.Module, source: Source, measured: Sequence[Measurement], done: Done
    ) -> Iterator[None]:
        """A batch a step; the last one says that nothing follows."""
        sender = Sender(worker)
        next_number = worker.rank
        worker.driver.progress("input", 0)
        for dealt in self.deal.batches(worker, source):
            worker.driver.progress("compute", done.batches)
            if dealt.rows:
                for one in measured:
                    one.add(model, dealt.batch, dealt.rows)
            if self.outputs is not None:
                batch = self._outputs(self.outputs, model, dealt) if dealt.rows else None
                sender.add(batch, number=dealt.number, last=dealt.last)
            worker.driver.computed(dealt.rows)
            done.batches += 1
            done.rows += dealt.rows
            next_number = dealt.number + worker.size
            worker.driver.progress("input", done.batches)
            yield
        if self.outputs is not None and not self.deal.leases_of(source):
            sender.end(next_number, worker.size)

    def _outputs(self, function: Function, model: nn.Module, dealt: Dealt) -> pa.RecordBatch:
        kept = None
        if self.keep:
            if not isinstance(dealt.batch, Mapping):
                raise BadInput(
                    f"keep={tuple(self.keep)!r} names columns of the data, and a batch of it is no dict but {describe(dealt.batch)}: leave keep out, or give "
                    "data whose batches are dicts (a table, a dict of arrays)"
                )
            if missing := [name for name in self.keep if name not in dealt.batch]:
                raise BadInput(f"keep: the data has no column {missing[0]!r}; it has {', '.join(dealt.batch)}")
            kept = {name: dealt.batch[name] for name in self.keep}
        batch = to_batch(function(model, dealt.batch), kept)
        if batch.num_rows != dealt.rows:
            raise BadInput(
                f"the function gave {batch.num_rows} rows for a batch of {dealt.rows}: give one row for each, in the batch's order"
            )
        return batch


@dataclass
class Done:
    """What a worker has done so far."""

    batches: int = 0
    rows: int = 0


@dataclass
class Sender:
    """Delivers record batches in pieces of about PIECE_BYTES."""

    worker: Worker
    _held: list[pa.RecordBatch] = field(default_factory=list)
    _part: int = 0

    def add(self, batch: pa.RecordBatch | None, *, number: int, last: bool) -> None:
        """The next rows of a number; None: no more of them. `last` ends the number."""
        if batch is not None:
            self._held.append(batch)
        if not last and sum(one.nbytes for one in self._held) < PIECE_BYTES:
            return
        rows, data = sum(one.num_rows for one in self._held), pack(self._held) if self._held else b""
        self._held = []
        piece = RowPiece(rank=self.worker.rank, number=number, part=self._part, last=last, rows=rows, data=data)
        self._part = 0 if last else self._part + 1
        self.worker.driver.deliver(piece)

    def end(self, number: int, parts: int) -> None:
        """From this number on there is nothing of this worker's."""
        self.worker.driver.deliver(RowPiece(rank=self.worker.rank, number=number, parts=parts))


def _together(worker: Worker, steps: Iterator[None]) -> None:
    """A step on each rank, then what they delivered goes to all; until none has any left."""
    left = True
    while left:
        own = next(steps, _OVER) is not _OVER
        worker.driver.collect(worker.group)
        left = any(worker.group.all_gather_json(own))


_OVER = object()


def placed(model: nn.Module, worker: Worker) -> nn.Module:
    """The model on this worker's device; the caller's own module is not moved, and workers in one process have one each."""
    wrong = any(one.device != worker.device for one in [*model.parameters(), *model.buffers()])
    if worker.shares_process or (wrong and worker.size == 1):
        model = copy.deepcopy(model)
    return model.to(worker.device) if wrong else model


def inputs_of(batch: Any) -> Any:
    """What the model is called on by itself: the batch, or the first of a tuple. BadInput for a dict."""
    if isinstance(batch, Mapping):
        raise BadInput(
            f"a batch of the data is a dict ({', '.join(map(str, batch))}), and which of its columns the model takes is not known: give "
            "function=lambda model, batch: model(batch['…'])"
        )
    is_column = next(((path == "") for path, _ in columns(batch)), True)
    return batch if is_column or not isinstance(batch, list | tuple) else batch[0]


def call_model(model: nn.Module, batch: Any) -> Any:
    """The outputs where no function is given."""
    return model(inputs_of(batch))


def call_for_targets(model: nn.Module, batch: Any) -> Any:
    """(outputs, targets) of batches that are (inputs, targets), where no function is given."""
    if not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise BadInput(
            f"metrics of outputs and targets need batches that are pairs (inputs, targets), and one is {describe(batch)}: give "
            "function=lambda model, batch: (outputs, targets)"
        )
    return model(batch[0]), batch[1]
