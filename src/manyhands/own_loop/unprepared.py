"""A program on several workers that trains and never calls `prepare`: each worker then trains all rows, for itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from manyhands.worker import Worker

STEPS = 3
"""The optimizer step at which the program is judged."""

_APART = (
    "an optimizer took {steps} steps, and the {size} workers exchanged nothing: each of them trains all rows, for itself. "
    "Prepare model, optimizer and training loader, and iterate the loader that comes back: "
    "model, optimizer, loader = mh.prepare(model, optimizer, loader)"
)


@contextmanager
def warning_if_unprepared(worker: Worker) -> Iterator[None]:
    """Within, rank 0 warns once if the program trains on several workers as if there were one.

    Judged without a message: nobody called `prepare` or asked for the worker, the group was not used, and no torch.distributed either.
    """
    if worker.rank or worker.size == 1:
        yield
        return
    before, steps = worker.group.ledger.as_dict(), 0

    def stepped(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps != STEPS:
            return
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        if worker.prepared is None and worker.group.ledger.as_dict() == before and not joined:
            warnings.warn(_APART.format(steps=steps, size=worker.size), stacklevel=3)

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()
