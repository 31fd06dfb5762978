"""`evaluate`: metrics of a model over all rows of some data, computed by all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.data.batch import Collate
from manyhands.engines.base import Engine
from manyhands.engines.driver.row_collector import RowCollector
from manyhands.errors import BadInput
from manyhands.inference.measurements import Means, OfTorchmetrics, torchmetrics_of
from manyhands.inference.predict import DEFAULT_BATCH_SIZE, Progress, deal_of, launch_spec, launched
from manyhands.inference.program import Function, Measurement, Program, call_for_targets
from manyhands.inference.trained import trained
from manyhands.recording.run import Run
from manyhands.task import Evaluate, Task, is_one_number, named

OfAll = Callable[[Any], Mapping[str, Any]]


def evaluate(
    model: nn.Module | Run | str | Path,
    data: Any = None,
    *,
    metrics: Evaluate | Any = None,
    of_all: OfAll | None = None,
    function: Function | None = None,
    workers: int | None = None,
    engine: Engine | str = "auto",
    batch_size: int = DEFAULT_BATCH_SIZE,
    collate: Collate | None = None,
    loader_processes: int = 0,
    task: Task | str | None = None,
    device: str = "auto",
    threads_per_worker: int | None = None,
    timeout_s: float = 300.0,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Metrics of a model over all rows of `data`, each row once, the same for any number of workers.

    model: an nn.Module, a Run, or the directory of a finished run.
    data: anything that a task takes as data. Default: the run's test data, else its validation data.
    metrics: one of

        - a function (model, batch) -> {name: mean over the batch, (mean, weight), or `manyhands.task.Summed`}, as
          Task.evaluate: means over all rows are weighted by rows, or by the weights given;
        - a metric of torchmetrics, a MetricCollection, or a dict of metrics: each is updated with what `function`
          returns, and the states of all workers are merged.

        Default: the run's task's own, unless `of_all` is given.
    of_all: a function of all rows that `function` returned, in the data's order, for what is no mean (a median, an AUC): it
        is called once, on the driver, and returns {name: number}. The rows are in memory there.
    function: (model, batch) -> what metrics of torchmetrics are updated with, and what `of_all` gets: a tuple of tensors
        whose first dimension counts rows. Default: (model(inputs), targets), of batches that are such pairs.
    workers, engine, device, threads_per_worker, timeout_s: as of `train`.
    batch_size: rows of one call. Batches are cut as one process would cut them, see `predict`.
    collate, loader_processes: as of a Task.
    task: where `model` is a directory whose task lies in a file (my.py:task), or was given as an object.
    progress: called on the driver with (rows so far, all rows, or 0 where nobody knows), where `of_all` is given.

    Means and sums are added up in float64: those of N workers differ from one's by rounding alone.

    Raises BadInput for what cannot be, WorkerFailed when a worker raises, dies or hangs, and Preempted after SIGTERM.
    """
    module, known = trained(model, task, "evaluate")
    if data is None:
        data = None if known is None else known.test_data if known.test_data is not None else known.validation_data
    if data is None:
        raise BadInput("evaluate needs data: the run's task has none for tests or validation, or is not known here")
    measured = _measurements(metrics, function, known, of_all is not None)
    place, spec = launch_spec(engine, workers, data, batch_size, device, threads_per_worker, timeout_s)
    deal = deal_of(place, data, batch_size, collate or (known.collate if known else None), loader_processes)
    program = Program(
        model=module,
        deal=deal if of_all is not None else deal.unordered(),
        outputs=None if of_all is None else (function or call_for_targets),
        measurements=measured,
        spmd=place.capabilities.spmd,
    )
    with RowCollector(None, progress=progress) as collector:
        first = next(one for one in launched(place, program, spec, collector) if one is not None)
        found: dict[str, float] = dict(first["metrics"])
        if of_all is not None:
            collector.finish()
            found |= _checked(of_all(collector.values()))
    return found


def _measurements(
    metrics: Any, function: Function | None, task: Task | None, others: bool
) -> list[Callable[[], Measurement]]:
    """What makes the measurements, on each worker. BadInput for other metrics than `evaluate` names."""
    if metrics is None:
        if others:
            return []
        if task is None:
            raise BadInput(
                "evaluate needs metrics= (or of_all=): a function of (model, batch) -> {name: mean}, or metrics of torchmetrics; a run that was given its task "
                "as an object needs it, or task="
            )
        alone = task.with_fields(train_data=(), validation_data=None, test_data=None)  # the data travels by itself
        return [partial(Means, None, alone if task.kernel is not None else alone.with_fields(model=_no_model))]
    if (objects := torchmetrics_of(metrics)) is not None:
        made = partial(OfTorchmetrics, objects, function or call_for_targets)
        made()  # what cannot be merged is refused now
        return [made]
    if callable(metrics):
        return [partial(Means, metrics)]
    raise BadInput(
        f"metrics must be a function of (model, batch), a metric of torchmetrics, or a dict of these; not {named(metrics)}"
    )


def _no_model() -> nn.Module:
    """In the place of a task's model and data, which are not needed to measure: the model goes along once."""
    raise AssertionError("the task's model was asked for")


def _checked(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping) or not all(is_one_number(value) for value in found.values()):
        raise BadInput(f"of_all(rows) must return {{name: number}}, not {named(found)}")
    return {str(name): float(value) for name, value in found.items()}
