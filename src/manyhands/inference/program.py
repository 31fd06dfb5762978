"""What each worker does: it runs the model on its batches, measures them, and delivers what comes out, in order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

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
        done = Counts()
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
        self, worker: Worker, model: nn.Module, source: Source, measured: Sequence[Measurement], done: Counts
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
                if dealt.rows:
                    kept = self._kept(dealt)
                    sender.hold(self.outputs(model, dealt.batch), kept, dealt.rows)
                sender.send(number=dealt.number, last=dealt.last)
            worker.driver.computed(dealt.rows)
            done.batches += 1
            done.rows += dealt.rows
            next_number = dealt.number + worker.size
            worker.driver.progress("input", done.batches)
            yield
        if self.outputs is not None and not self.deal.leases_of(source):
            sender.end(next_number, worker.size)

    def _kept(self, dealt: Dealt) -> dict[str, Any] | None:
        """The columns of a batch that go along."""
        if not self.keep:
            return None
        if not isinstance(dealt.batch, Mapping):
            raise BadInput(
                f"keep={tuple(self.keep)!r} names columns of the data, and a batch of it is no dict but {describe(dealt.batch)}: leave keep out, or give "
                "data whose batches are dicts (a table, a dict of arrays)"
            )
        if missing := [name for name in self.keep if name not in dealt.batch]:
            raise BadInput(f"keep: the data has no column {missing[0]!r}; it has {', '.join(dealt.batch)}")
        return {name: dealt.batch[name] for name in self.keep}


@dataclass
class Counts:
    """What a worker has done so far."""

    batches: int = 0
    rows: int = 0


@dataclass
class Sender:
    """Delivers what comes out of the batches in pieces of about PIECE_BYTES."""

    worker: Worker
    _tensors: list[Tensor] = field(default_factory=list)  # outputs of one kind that are not packed yet
    _batches: list[pa.RecordBatch] = field(default_factory=list)
    _bytes: int = 0
    _part: int = 0

    def hold(self, outputs: Any, kept: Mapping[str, Any] | None, rows: int) -> None:
        """The outputs of a batch of so many rows, and columns of it. BadInput where they are no rows, or not as many."""
        if isinstance(outputs, Tensor) and kept is None and outputs.dim() and outputs.layout == torch.strided:
            if self._tensors and not _alike(self._tensors[-1], outputs):
                self._pack_tensors()
            self._tensors.append(outputs)
            self._bytes += outputs.nbytes
            found = len(outputs)
        else:
            self._pack_tensors()
            self._batches.append(batch := to_batch(outputs, kept))
            self._bytes += batch.nbytes
            found = batch.num_rows
        if found != rows:
            raise BadInput(
                f"the function gave {found} rows for a batch of {rows}: give one row for each, in the batch's order"
            )

    def send(self, *, number: int, last: bool) -> None:
        """What is held is of this number; it goes if it is enough, or the last of the number."""
        if not last and self._bytes < PIECE_BYTES:
            return
        self._pack_tensors()
        rows, data = sum(one.num_rows for one in self._batches), pack(self._batches) if self._batches else b""
        self._batches, self._bytes = [], 0
        piece = RowPiece(rank=self.worker.rank, number=number, part=self._part, last=last, rows=rows, data=data)
        self._part = 0 if last else self._part + 1
        self.worker.driver.deliver(piece)

    def _pack_tensors(self) -> None:
        """As one record batch: small batches would cost more to pack one by one than to compute."""
        if self._tensors:
            self._batches.append(to_batch(torch.cat(self._tensors)))
            self._tensors = []

    def end(self, number: int, parts: int) -> None:
        """From this number on there is nothing of this worker's."""
        self.worker.driver.deliver(RowPiece(rank=self.worker.rank, number=number, parts=parts))


def _alike(first: Tensor, second: Tensor) -> bool:
    return (first.dtype, first.shape[1:], first.device) == (second.dtype, second.shape[1:], second.device)


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


def on_cpu(model: nn.Module) -> nn.Module:
    """The model as it travels to other processes: on the CPU, a copy if it is elsewhere."""
    if all(one.device.type == "cpu" for one in [*model.parameters(), *model.buffers()]):
        return model
    return copy.deepcopy(model).cpu()


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
