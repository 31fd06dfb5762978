"""Checks of the first steps of a user's own loop: whether the workers train apart, or compute the same gradient."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.own_loop.session import Session

STEPS = 3
"""So many steps are looked at, at most: in the first one that every rank has a gradient for, the answer is known."""

_ALIKE = (
    "all {size} workers computed the same gradient in step {step}, so they train on the same rows. Iterate the loader "
    "that mh.prepare returns: model, optimizer, loader = mh.prepare(model, optimizer, loader). Without a loader, see "
    "help(mh.prepare). If you want equal rows, call mh.weight(1) before backward()."
)
_APART = (
    "{size} workers took {steps} optimizer steps without exchanging anything, so each of them trains alone on all "
    "rows. Call model, optimizer, loader = mh.prepare(model, optimizer, loader), and iterate that loader"
)
_ONE_APART = (
    "an optimizer ({kind}) took {steps} steps and was not prepared, beside one that was: its parameters differ from worker to worker. Prepare each "
    "pair of model and optimizer: model, optimizer = mh.prepare(model, optimizer)"
)


class FirstSteps:
    """Of one pair: compares the ranks' own gradients in its first steps.

    Dropout differs from rank to rank after the first backward, so a single step decides. Equal gradients are lawful,
    and not compared, of a prepared loader's batch, with a weight that the user stated or that is 0, and where all are
    zeros.
    """

    def __init__(self, session: Session, *, compares: bool = True) -> None:
        """compares: else nothing is done: workers that go at their own pace exchange through no group."""
        self._session = session
        self.left = STEPS if session.worker.size > 1 and compares else 0  # still looked at, the same on all ranks
        self._own: int | None = None  # checksum of this step's own gradients

    def collected(self, gradients: Tensor, weight_known: bool) -> None:
        """gradients: this worker's [D'] before any exchange. weight_known: a loader or the user gave their weight."""
        if not self.left:
            return
        if weight_known:
            self._own = None
        elif bool(gradients.any()):
            self._own = checksum(gradients, self._own or 0)

    def stepped(self, step: int) -> None:
        """A step is over. A collective in the first steps; rank 0 warns, once a session."""
        if not self.left:
            return
        self.left -= 1
        own, self._own = self._own, None
        everybodys = self._session.worker.group.all_gather_json(own)
        if None in everybodys:
            return
        self.left = 0
        if len(set(everybodys)) == 1 and not self._session.alike_warned:
            self._session.alike_warned = True
            if self._session.worker.rank == 0:
                warnings.warn(_ALIKE.format(size=len(everybodys), step=step), stacklevel=5)  # the user's step()


def _are_prepared(worker: Worker, optimizer: torch.optim.Optimizer) -> bool:
    """Whether another optimizer that was prepared holds these parameters, and calls this one; all are with whole batches."""
    session: Session | None = worker.prepared
    if session is None or session.whole is not None:
        return session is not None
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(own <= pair.own for pair in session.pairs)


def checksum(vector: Tensor, start: int = 0) -> int:
    """CRC-32 of a vector's bits, after another's."""
    return zlib.crc32(vector.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, start)


@contextmanager
def warning_if_unprepared(worker: Worker) -> Iterator[None]:
    """Within, rank 0 warns once if the program trains on several workers as if there were one.

    Judged without a message: nobody called `prepare` or asked for the worker, no group or torch.distributed was used.
    Once something was prepared, an optimizer that was not is named.
    """
    if worker.rank or worker.size == 1:
        yield
        return
    before, steps, each = worker.group.ledger.as_dict(), 0, Counter[int]()

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        own = getattr(optimizer, "manyhands_trains", False) or _are_prepared(worker, optimizer)
        if worker.prepared is not None and worker.prepared.prepared and not joined and not own:
            each[id(optimizer)] += 1
            if each[id(optimizer)] == STEPS:
                warnings.warn(_ONE_APART.format(kind=type(optimizer).__name__, steps=STEPS), stacklevel=3)
        if steps != STEPS:
            return
        if worker.prepared is None and worker.group.ledger.as_dict() == before and not joined:
            warnings.warn(_APART.format(steps=steps, size=worker.size), stacklevel=3)

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()
