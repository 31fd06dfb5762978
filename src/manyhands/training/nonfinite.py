"""Whose gradient it was, where the mean of all is not finite."""

from __future__ import annotations

from manyhands import units
from manyhands.data.feed import Slice
from manyhands.errors import NotFinite
from manyhands.replica.replica import Replica
from manyhands.worker import Worker


def named(error: NotFinite, replica: Replica, worker: Worker, part: Slice) -> NotFinite:
    """The error with the workers whose own gradient of this step is not finite; a collective of all, who have the error.

    Each computes its gradient again, over the same rows, so that steps without such an error cost nothing more. Where
    a worker has the error for itself, because it moves by its own gradient, nobody else can be asked. Of a kernel, the
    slice is named.
    """
    if not replica.executor.has_gradients:
        return NotFinite(
            f"{error} (worker {worker.worker_id}, slice {part.part} of global batch {part.index} of its epoch)"
        )
    if not replica.has_mean or worker.group.size == 1:
        return error
    worker.driver.progress("compute", replica.step)
    own = replica.computes_finite(part.batch)
    worker.driver.progress("exchange", replica.step)
    everyone = worker.group.all_gather_json([worker.worker_id, own])
    wrong = [str(worker_id) for worker_id, finite in everyone if not finite]
    if not wrong:
        found = "each worker's own gradient is finite: their mean overflows, or layers such as dropout drew otherwise"
    elif len(wrong) == 1:
        found = f"the own gradient of worker {wrong[0]} alone is not finite"
    else:
        found = f"the own gradients of workers {units.named(wrong, 20)} are not finite"
    return NotFinite(f"{error}. Computed again by each worker apart, {found}")
