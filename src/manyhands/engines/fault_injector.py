"""Faults of one worker, at the step and phase that `faults=` names: there it is killed or stopped, has a gradient that is
not finite, or a full disk.

The places are those that a worker passes anyway. It reports its phase to the driver. Inside an exchange is between the
start of a mean, which the peers see, and the wait for it; at a server, where its bytes are counted. A commit is where
an optimizer begins its step. A gradient is computed by `torch.autograd.backward`, and files of checkpoints are written by
`checkpoints.synced`: `install` has these three pass the injector of the worker whose turn it is.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.checkpoint import checkpoints
from manyhands.comm.group import Group, MeanResult, Work
from manyhands.engines.faults import Fault, Phase
from manyhands.server.base import Server

T = TypeVar("T")

_REPORTED: dict[str, Phase] = {"start": "join", "compute": "compute", "checkpoint": "save"}
"""Where a worker reports that it begins a phase. It begins an exchange before it has sent anything."""

_EXCHANGING = ("exchange", "complete", "commit")

_COLLECTIVES = ("all_reduce_", "all_gather", "reduce_scatter", "broadcast_", "send", "receive_", "swap")


class FaultInjector:
    """strike: (fault, step) -> None: report that it happens, now; kill or stop the worker that it names, here."""

    def __init__(self, faults: Sequence[Fault], strike: Callable[[Fault, int], None]) -> None:
        self._left, self._strike = list(faults), strike
        self._step = -1  # whose exchange, and then whose commit, comes next; -1: none
        self._computing = -1  # the step whose gradient is computed, while which slices of it may be sent already
        self._spoils = False  # the gradient of the rows at hand is not finite, however often it is computed
        self._full: list[Fault] = []  # what the next file of a checkpoint meets

    def reach(self, phase: str, step: int) -> None:
        """The worker begins a phase, as it reports it to the driver."""
        self._step = step if phase in _EXCHANGING else -1
        self._computing = step if phase == "compute" else -1
        if phase == "input":
            self._spoils = False
        if phase in _REPORTED:
            self._befall(_REPORTED[phase], step)

    def watch(self, group: Group | None = None, server: Server | None = None) -> None:
        """The operations of this group and server are its worker's exchanges."""
        if group is not None:
            self._watch_group(group)
        if server is not None:
            add = server.ledger.add

            def counted(operation: str, bytes: int, messages: int = 1) -> None:
                if operation != "resent":  # that is no operation of its own, and not in the worker's turn
                    self._exchanges()
                add(operation, bytes, messages)

            server.ledger.add = counted  # type: ignore[method-assign]

    def _watch_group(self, group: Group) -> None:
        for name in _COLLECTIVES:
            setattr(group, name, self._before(getattr(group, name)))
        start, mean = group.start_mean_, group.mean_

        def start_mean_(*args: Any, **options: Any) -> Work:
            work = start(*args, **options)
            self._exchanges()
            if self._computing >= 0:
                self._befall("exchange", self._computing)
            return work

        def mean_(*args: Any, **options: Any) -> MeanResult:
            return start_mean_(*args, **options).wait() if self._step >= 0 else mean(*args, **options)

        group.start_mean_, group.mean_ = start_mean_, mean_  # type: ignore[method-assign]

    @property
    def spoils(self) -> bool:
        """Whether the gradient that is computed now is not finite."""
        return self._spoils and self._computing >= 0

    def commits(self) -> None:
        """An optimizer begins its step."""
        if self._step >= 0:
            self._befall("commit", self._step)

    def writes(self, path: Path) -> None:
        """A file of a checkpoint is written. Raises OSError where the disk is full."""
        saved = re.match(r"step-(\d+)", path.parent.name)
        due = [fault for fault in self._full if saved is None or int(saved[1]) >= (fault.step or 0)]
        if due:  # an older checkpoint's files may still be on their way
            self._full.remove(fault := due[-1])
            self._strike(fault, fault.step or 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _before(self, plain: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **options: Any) -> T:
            self._exchanges()
            return plain(*args, **options)

        return call

    def _exchanges(self) -> None:
        if self._step >= 0:
            self._befall("exchange", self._step)

    def _befall(self, phase: Phase, step: int) -> None:
        for fault in [one for one in self._left if (_phase_of(one), one.step) == (phase, step)]:
            self._left.remove(fault)
            if fault.what == "disk":
                self._full.append(fault)
                continue
            self._spoils |= fault.what == "nan"
            self._strike(fault, step)


def _phase_of(fault: Fault) -> Phase:
    return "save" if fault.what == "disk" else fault.phase


def install(faults: Iterable[Fault], injector: Callable[[], FaultInjector | None]) -> Callable[[], None]:
    """Have what these faults need in this process pass `injector()`, that of the worker whose turn it is; how to end that."""
    backward, synced, undo = torch.autograd.backward, checkpoints.synced, list[Callable[[], None]]()

    def commits(*_: Any) -> None:
        if (own := injector()) is not None:
            own.commits()

    def spoiled(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        if (own := injector()) is not None and own.spoils:
            tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            grad_tensors = [torch.full_like(tensor, math.nan) for tensor in tensors]
        backward(tensors, grad_tensors, *args, **options)

    @contextmanager
    def full(path: Path) -> Iterator[io.BufferedWriter]:
        with synced(path) as file:
            if (own := injector()) is not None:
                own.writes(path)
            yield file

    planned = list(faults)
    if any(fault.phase == "commit" for fault in planned):
        undo.append(register_optimizer_step_pre_hook(commits).remove)
    if any(fault.what == "nan" for fault in planned):
        torch.autograd.backward = spoiled
        undo.append(lambda: setattr(torch.autograd, "backward", backward))
    if any(fault.what == "disk" for fault in planned):
        checkpoints.synced = full
        undo.append(lambda: setattr(checkpoints, "synced", synced))

    def end() -> None:
        for one in undo:
            one()

    return end
