"""A task's executor for one stage: its model is traced and cut, and this worker's part of it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands import rng
from manyhands.data.batch import naming_columns, rows_of, slice_rows
from manyhands.parallel.mesh import place_of
from manyhands.parallel.schedules import micro_batches_of
from manyhands.parallel.spec import ModelParallel
from manyhands.parallel.stage_executor import StageExecutor
from manyhands.parallel.trace import trace
from manyhands.task import Task
from manyhands.worker import Worker


def staged(task: Task, worker: Worker, spec: ModelParallel, first_rows: Callable[[], Any]) -> StageExecutor:
    """A collective of the replica's workers, whose mesh is made. first_rows: gives a batch of this replica's rows."""
    micro_batches = spec.micro_batches
    if micro_batches is None and task.micro_batch_size is None:
        micro_batches = 2 * spec.stages
    with rng.kept():
        batch = first_rows()
    start, stop = next(
        micro_batches_of(rows_of(batch), micro_batches, None if micro_batches else task.micro_batch_size)
    )
    with naming_columns(batch):
        found = trace(task.model, task.loss, slice_rows(batch, start, stop))
    cuts = found.equal_cuts(spec.stages) if spec.cuts is None else found.chosen(spec.cuts)
    place = place_of(worker, found, cuts)
    recomputes = spec.recompute == "units"
    return StageExecutor(
        task,
        found,
        cuts,
        place,
        schedule=spec.schedule,
        micro_batches=micro_batches,
        recomputes=recomputes,
        offloads=spec.offload == "disk",
    )
