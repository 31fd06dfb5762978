"""Whose gradient it was, where the mean of all is not finite."""

from __future__ import annotations

from typing import Any

from manyhands import units
from manyhands.errors import NotFinite
from manyhands.replica.replica import Replica
from manyhands.worker import Worker


def named(error: NotFinite, replica: Replica, worker: Worker, batch: Any | None) -> NotFinite:
    """The error with the workers whose own gradient of this step is not finite; a collective of all, who have the error.

    Each computes its gradient again, over the same rows, so that steps without such an error cost nothing more. Where
    a worker has the error for itself, because it moves by its own gradient, nobody else can be asked.
    """
    if not replica.has_mean or worker.group.size == 1:
        return error
    worker.driver.progress("compute", replica.step)
    own = replica.computes_finite(batch)
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
