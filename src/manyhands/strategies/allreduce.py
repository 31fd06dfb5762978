"""Synchronous data parallelism: every step applies the mean gradient of all workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from typing_extensions import override

from manyhands.comm.group import MeanResult, Work
from manyhands.errors import BadInput
from manyhands.strategies import compression
from manyhands.strategies.base import Needs, StepResult, Strategy, Traits
from manyhands.strategies.compression import CompressedState, CompressOptions
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class AllReduceState(CompressedState):
    """The slices of this tick's gradient that are under way, and what compression left out."""

    handles: list[Work] = field(default_factory=list)

    @override
    def merge(self, others: list[AllReduceState], rank: int, size: int) -> AllReduceState:
        """With another number of ranks, each takes the mean of what was left out."""
        if len(others) == size:
            return others[rank]
        return replace(others[0], residual=self.shared(others, size, adds=False))


@dataclass(frozen=True, kw_only=True)
class AllReduce(CompressOptions, Strategy):
    """Large-batch SGD, split over workers.

    Source: Revisiting Distributed Synchronous SGD, Jianmin Chen, Xinghao Pan, Rajat Monga, Samy Bengio, Rafal
    Jozefowicz, 2016 (without backup workers).

    1. Every worker computes the gradient of the mean loss over its slice of the global batch.
    2. All gradients are replaced by their mean, weighted by what the loss counts.
    3. Every worker applies the same step to the same parameters.

    N workers equal one worker with the same task, up to the rounding of sums. With `compress`, step 2 is the mean of
    what the codec leaves of each gradient; with one worker nothing is compressed.
    """

    overlap: bool = False
    """Send slices while backward runs. Worth it where the link is slow and cores, or a GPU, are free meanwhile."""

    name: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Revisiting Distributed Synchronous SGD, Chen, Pan, Monga, Bengio, Jozefowicz, 2016"
    summary: ClassVar[str] = "gradients, every step"
    consistency: ClassVar[str] = "synchronous"
    needs: ClassVar[Needs] = Needs(mean_gradient=True, gradients=True)
    traits: ClassVar[Traits] = Traits(exact=True)

    def __post_init__(self) -> None:
        compression.check(self.name, self)
        if self.overlap and self.compress != "none":
            raise BadInput(
                f"strategy allreduce: overlap sends slices while backward computes, and compress={self.compress} looks at the whole gradient: give one of them"
            )

    @override
    def start(self, replica: Replica, worker: Worker) -> AllReduceState:
        compression.refuse_own_loop(self.name, replica, self)
        state = AllReduceState(**compression.remembered(self, replica, worker))
        if self.overlap:

            def begin(gradients: Tensor) -> None:
                state.handles.append(worker.mesh.data.start_mean_(gradients, replica.weight, replica.bits()))

            replica.on_ready(begin)
        return state

    @override
    def forget_step(self, replica: Replica, worker: Worker, state: AllReduceState) -> None:
        state.handles.clear()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: AllReduceState) -> StepResult:
        if self.overlap:
            _wait(replica, worker, state)
        else:
            remember = compression.mean_gradients(self, replica, worker, state)
            if self.compress != "none":  # what is left out is each worker's own: nobody else can give it back

                def commit() -> bool:
                    remember()
                    return replica.apply()

                applied = replica.complete(worker.mesh.data, commit)
                return StepResult(applied=applied, rows_left=replica.control.any_rank_has_rows)
        return StepResult(applied=replica.apply(), rows_left=replica.control.any_rank_has_rows)


def _wait(replica: Replica, worker: Worker, state: AllReduceState) -> None:
    totals = [handle.wait() for handle in state.handles]
    state.handles.clear()
    bits = 0
    for total in totals:
        bits |= total.bits
    replica.rounds += worker.mesh.data.size > 1
    replica.record_mean(MeanResult(totals[0].weight, bits))
