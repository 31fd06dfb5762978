"""Synchronous data parallelism: every step applies the mean gradient of all workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from typing_extensions import override

from manyhands.comm.group import Handle, Total
from manyhands.strategies.base import Needs, State, Strategy
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica import Replica


@dataclass(kw_only=True)
class AllReduceState(State):
    """The slices of this tick's gradient that are under way."""

    handles: list[Handle] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Large-batch SGD, split over workers.

    Source: Revisiting Distributed Synchronous SGD, Jianmin Chen, Xinghao Pan, Rajat Monga, Samy Bengio, Rafal
    Jozefowicz, 2016 (without backup workers).

    1. Every worker computes the gradient of the mean loss over its slice of the global batch.
    2. All gradients are replaced by their mean, weighted by what the loss counts.
    3. Every worker applies the same step to the same parameters.

    N workers equal one worker with the same task, up to the rounding of sums.
    """

    overlap: bool = False
    """Send slices while backward still computes the rest. Turn it on where the link is slow and cores, or a GPU, are free meanwhile."""

    name: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Revisiting Distributed Synchronous SGD, Chen, Pan, Monga, Bengio, Jozefowicz, 2016"
    summary: ClassVar[str] = "gradients, every step"
    consistency: ClassVar[str] = "synchronous"
    needs: ClassVar[Needs] = Needs(mean_gradient=True)

    @override
    def start(self, replica: Replica, worker: Worker) -> AllReduceState:
        replica.agree(worker.group)
        state = AllReduceState()
        if self.overlap:

            def begin(gradients: Tensor) -> None:
                state.handles.append(worker.group.start_mean_(gradients, replica.weight, replica.bits()))

            replica.on_ready(begin)
        return state

    @override
    def exchange(self, replica: Replica, worker: Worker, state: AllReduceState) -> bool:
        if self.overlap:
            _wait(replica, worker, state)
        else:
            replica.mean_gradients(worker.group)
        replica.apply()
        return replica.anybody_has_rows


def _wait(replica: Replica, worker: Worker, state: AllReduceState) -> None:
    totals = [handle.wait() for handle in state.handles]
    state.handles.clear()
    bits = 0
    for total in totals:
        bits |= total.bits
    replica.rounds += worker.size > 1
    replica.averaged(Total(totals[0].weight, bits))
