"""The first steps of a user's own loop, looked at: whether all workers compute the same gradient, and whether the loss is a sum."""

from __future__ import annotations

import warnings
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyhands.own_loop import summed

if TYPE_CHECKING:
    from manyhands.own_loop.session import Session

STEPS = 3
"""So many steps are looked at, at most: in the first one that every rank has a gradient for, the answer is known."""

_ALIKE = (
    "all {size} workers computed the same gradient in step {step}, so they train on the same rows, and {size} workers do the work of one. "
    "Iterate the loader that mh.prepare gives back: model, optimizer, loader = mh.prepare(model, optimizer, loader). "
    "For batches that are drawn without a loader, see help(mh.prepare). If it is meant so, state the weight: mh.weight(1)."
)
_SUMMED = (
    "the loss adds up over the batch's rows ({functions}), and each worker has a part of the batch: the mean of the workers' gradients is 1/{size} of "
    "what one process computes. Divide the loss by the batch's rows (reduction='mean'), or keep the sum, before backward(): "
    "mh.weight(1); loss = loss * mh.worker().size. See docs/own-loop.md."
)


class FirstLosses:
    """Of one session: looks at the losses of its first backwards. Nothing travels: rank 0's loss is everybody's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left = STEPS if session.worker.size > 1 and session.worker.rank == 0 else 0
        self._unwatch = summed.watch(self) if self._left else lambda: None

    def backward_over(self) -> None:
        """A backward that reached a pair is over, its loss is `summed.under_way()`'s. Warns once, of a loader's rows."""
        if not self._left:
            return
        self._left -= 1
        rows = self._session.counted_rows
        sums = [one.function for one in summed.under_way() if rows is not None and one.over(rows)]
        if sums:
            self._left = 0
            functions = ", ".join(dict.fromkeys(sums))
            # the user's backward(), where the engine calls back in its thread
            warnings.warn(_SUMMED.format(functions=functions, size=self._session.worker.size), stacklevel=8)
        if not self._left:
            self._unwatch()


class FirstSteps:
    """Of one pair: compares the ranks' own gradients in its first steps.

    Dropout differs from rank to rank after the first backward, so a single step decides. Nothing is compared where equal gradients
    are lawful: a batch of a prepared loader, a weight that the user stated or that is 0, a gradient of zeros alone.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left = STEPS if session.worker.size > 1 else 0
        self._own: int | None = None  # checksum of this step's own gradients

    def collected(self, gradients: Tensor) -> None:
        """These are this worker's own gradients, before any exchange; `gradients` [D']."""
        if not self._left:
            return
        if self._session.weight_known:
            self._own = None
        elif bool(gradients.any()):
            self._own = checksum(gradients, self._own or 0)

    def stepped(self, step: int) -> None:
        """A step is over. A collective in the first steps; rank 0 warns, once a session."""
        if not self._left:
            return
        self._left -= 1
        own, self._own = self._own, None
        everybodys = self._session.worker.group.all_gather_json(own)
        if None in everybodys:
            return
        self._left = 0
        if len(set(everybodys)) == 1 and not self._session.told_alike:
            self._session.told_alike = True
            if self._session.worker.rank == 0:
                warnings.warn(_ALIKE.format(size=len(everybodys), step=step), stacklevel=5)  # the user's step()


def checksum(vector: Tensor, start: int = 0) -> int:
    """CRC-32 of a vector's bits, after another's."""
    return zlib.crc32(vector.detach().cpu().view(torch.uint8).numpy().data, start)
