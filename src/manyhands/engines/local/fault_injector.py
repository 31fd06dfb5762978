"""Faults of one worker's process, at the step and phase that `faults=` names: it kills or stops itself there.

The places are those that a worker passes anyway. It reports its phase to the driver. Inside an exchange is between the
start of a mean, which the peers see, and the wait for it; at a server, where its bytes are counted. A commit is where
an optimizer begins its step.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.comm.group import MeanResult, Work
from manyhands.engines.faults import Fault, Phase
from manyhands.events import Event
from manyhands.worker import Worker

T = TypeVar("T")

_REPORTED: dict[str, Phase] = {"start": "join", "compute": "compute", "checkpoint": "save"}
"""Where a worker reports that it begins a phase. It begins an exchange before it has sent anything."""

_COLLECTIVES = ("all_reduce_", "all_gather", "reduce_scatter", "broadcast_", "send", "receive_", "swap")


class FaultInjector:
    """report: send an event to the driver, at once: this process may not live longer."""

    def __init__(self, faults: Sequence[Fault], report: Callable[[Event], None]) -> None:
        self._left, self._report = list(faults), report
        self._step = -1  # whose exchange, and then whose commit, comes next; -1: none
        if any(fault.phase == "commit" for fault in faults):
            register_optimizer_step_pre_hook(self._commits)

    def reach(self, phase: str, step: int) -> None:
        """The worker begins a phase, as it reports it to the driver."""
        self._step = step if phase == "exchange" else -1
        if phase in _REPORTED:
            self._befall(_REPORTED[phase], step)

    def watch(self, worker: Worker) -> None:
        """The operations of this worker's group and server are its exchanges."""
        group = worker.group
        for name in _COLLECTIVES:
            setattr(group, name, self._before(getattr(group, name)))
        start, mean = group.start_mean_, group.mean_

        def start_mean_(*args: Any, **options: Any) -> Work:
            work = start(*args, **options)
            self._exchanges()
            return work

        def mean_(*args: Any, **options: Any) -> MeanResult:
            return start_mean_(*args, **options).wait() if self._step >= 0 else mean(*args, **options)

        group.start_mean_, group.mean_ = start_mean_, mean_  # type: ignore[method-assign]
        if worker.server is not None:
            ledger = worker.server.ledger
            ledger.add = self._before(ledger.add)  # type: ignore[method-assign]

    def _before(self, plain: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **options: Any) -> T:
            self._exchanges()
            return plain(*args, **options)

        return call

    def _exchanges(self) -> None:
        if self._step >= 0:
            self._befall("exchange", self._step)

    def _commits(self, *_: Any) -> None:
        if self._step >= 0:
            self._befall("commit", self._step)

    def _befall(self, phase: Phase, step: int) -> None:
        for fault in [fault for fault in self._left if (fault.phase, fault.step) == (phase, step)]:
            self._left.remove(fault)
            self._report(
                Event(
                    type="fault", time_s=time.perf_counter(), rank=fault.node, step=step, values={"fault": str(fault)}
                )
            )
            # a stopped process goes on where it is when the driver sends SIGCONT
            os.kill(os.getpid(), signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
