"""The first steps of a user's own loop, looked at: whether all workers compute the same gradient."""

from __future__ import annotations

import warnings
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from manyhands.prepared.session import Session

STEPS = 3
"""So many steps are looked at, at most: in the first one that every rank has a gradient for, the answer is known."""

_ALIKE = (
    "all {size} workers computed the same gradient in step {step}, so they train on the same rows, and {size} workers do the work of one. "
    "Iterate the loader that mh.prepare gives back: model, optimizer, loader = mh.prepare(model, optimizer, loader). "
    "For batches that are drawn without a loader, see help(mh.prepare). If it is meant so, state the weight: mh.weight(1)."
)


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
    return zlib.crc32(vector.detach().cpu().view(torch.uint8).numpy(), start)
