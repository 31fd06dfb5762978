"""The final evaluation of a trial's model in the driver, the same for all variants: metrics and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands import rng
from manyhands.comm.solo import SoloGroup
from manyhands.data.batch import columns
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.source import Reading, Slices, Source
from manyhands.replica import evaluation
from manyhands.task import Evaluate, Metrics, Task

ROWS = 10_000
NUMBERS = 1_000_000  # that are kept of what one model predicts
BATCH = 256
CLASSES, OUTPUTS = "classes", "outputs"


@dataclass(frozen=True)
class FinalPredictions:
    """What a model says of the first rows: class numbers, int64 [n], or its outputs as they are, float32 [n]."""

    of: str  # classes | outputs
    values: Tensor

    def agreement(self, other: FinalPredictions) -> float | None:
        """Share of equal classes; of outputs 1 - |o - s| / |s|, at least 0. None where they cannot be compared."""
        if self.of != other.of or len(self.values) != len(other.values) or not len(self.values):
            return None
        if self.of == CLASSES:
            return float((self.values == other.values).double().mean())
        own, reference = self.values.double(), other.values.double()
        apart, size = float((own - reference).norm()), float(reference.norm())
        if apart == 0:
            return 1.0
        return max(0.0, 1 - apart / size) if size else 0.0


@dataclass(frozen=True)
class FinalEvaluation:
    """At one model and some rows."""

    metrics: dict[str, float]
    predictions: FinalPredictions | None
    """None where the task's `evaluate` never calls the model for a tensor with a row for each of the batch's."""


def evaluate_final(task: Task, model: nn.Module, data: Any, device: torch.device, rows: int = ROWS) -> FinalEvaluation:
    """Metrics over the first batches with `rows` rows, in the data's own order (a shuffling DataLoader's: that of seed
    0), and the predictions of the first NUMBERS numbers.

    The model is moved to `device` and left in evaluation mode.
    """
    watch = _Watch(task.metrics)
    source = FirstRows(open_source(data, collate=task.collate, loader_processes=0), rows)
    feed = Feed(source, batch_size=source.batch_size or BATCH, shuffle=False, device=device)
    with rng.kept():
        rng.seed_all(0)
        watched = task.with_fields(evaluate=watch)
        metrics = evaluation.evaluate(
            evaluation.of_model(watched, model.to(device).eval(), feed.device), feed, SoloGroup(), lambda batch: None
        )
    return FinalEvaluation(metrics, watch.predictions())


class FirstRows(Source):
    """The first batches of a source, until there are so many rows."""

    def __init__(self, source: Source, rows: int) -> None:
        self._source, self._most = source, rows
        self.batch_size = source.batch_size

    @override
    def epoch_rows(self, reading: Reading) -> int | None:
        return None

    @override
    def ticks(self, reading: Reading) -> int | None:
        return None

    @override
    def slices(self, reading: Reading) -> Slices:
        rows = 0
        with closing(self._source.slices(reading)) as slices:
            for part in slices:
                yield part
                rows += part.rows
                if rows >= self._most:
                    return


@dataclass
class _Watch:
    """A task's `evaluate` that keeps what the model gives it at its first call in each batch."""

    measure: Evaluate
    of: str = ""
    _kept: list[Tensor] = field(default_factory=list)
    _numbers: int = 0

    def __call__(self, model: nn.Module, batch: Any) -> Metrics:
        if self._numbers >= NUMBERS:
            return self.measure(model, batch)
        given: list[Any] = []
        handle = model.register_forward_hook(lambda module, inputs, outputs: given.append(outputs))
        try:
            metrics = self.measure(model, batch)
        finally:
            handle.remove()
        self._keep(given, [column for _, column in columns(batch)])
        return metrics

    def _keep(self, given: list[Any], batch: list[Any]) -> None:
        rows = len(batch[0])
        found = [tensor for tensor in _tensors(given[:1]) if tensor.dim() and len(tensor) == rows]
        if not found:
            return
        axis = _class_axis(found[0], batch)
        of, values = (OUTPUTS, found[0].float()) if axis is None else (CLASSES, found[0].argmax(axis))
        if self.of in ("", of):
            self.of = of
            kept = values.detach().reshape(-1)[: NUMBERS - self._numbers].cpu().clone()
            self._kept.append(kept)
            self._numbers += len(kept)

    def predictions(self) -> FinalPredictions | None:
        return FinalPredictions(self.of, torch.cat(self._kept)) if self._kept else None


def _tensors(outputs: Any) -> list[Tensor]:
    """The floating tensors in a model's outputs: themselves, or in tuples, lists and dicts."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _class_axis(outputs: Tensor, batch: list[Any]) -> int | None:
    """The axis of the outputs over two classes or more, by the shape of integers in the batch; None: no such axis."""
    targets = {
        tuple(column.shape)
        for column in batch
        if isinstance(column, Tensor) and not (column.is_floating_point() or column.dtype == torch.bool)
    }
    shape = tuple(outputs.shape)
    axes = (axis for axis in range(1, len(shape)) if shape[axis] > 1)
    return next((axis for axis in axes if shape[:axis] + shape[axis + 1 :] in targets), None)
