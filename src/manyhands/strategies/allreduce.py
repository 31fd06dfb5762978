"""Synchronous data parallelism: every step applies the mean gradient of all workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.adasum import adasum_
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

    With `combine=adasum`, step 2 is the adaptive sum of the gradients, parameter by parameter: of two it is
    (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, of more that of the sums of both halves (Scaling Distributed Training
    with Adaptive Summation, Maleki et al., 2021). Then N workers are not one worker: steps are up to N times as long.

    With `sharded`, each worker gets the mean of its part of the gradient (reduce-scatter), steps that part, and all
    gather the parameters: step 3 is made once for each parameter (stage 1 of ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models, Rajbhandari et al., 2020; BigDL, Dai et al., 2019). N workers equal one here, too.

    Deviations: adasum sums gradients, also where an optimizer with moments follows, for which the paper sums what each
    worker's optimizer would do.
    """

    combine: str = "mean"
    """How gradients become one: mean, or adasum, which adds what is orthogonal and averages what is parallel. Try adasum
    where a rate that suits one worker's batches is to serve 2, 4, 8, … workers as it is."""
    sharded: bool = False
    """Each worker steps its part of the parameters and keeps the optimizer's state of that part alone. Saves memory where
    the state is large: with Adam twice the parameters, divided by the workers. As many bytes travel."""
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
        if self.combine not in ("mean", "adasum"):
            raise BadInput(f"strategy allreduce: combine must be mean or adasum; got {self.combine!r}")
        if self.combine == "adasum" and (self.overlap or self.compress != "none"):
            other = "overlap" if self.overlap else f"compress={self.compress}"
            raise BadInput(
                f"strategy allreduce: combine=adasum looks at whole gradients, and {other} does not send them as a whole: give one of them"
            )
        others = {
            "combine=adasum": self.combine == "adasum",
            "overlap": self.overlap,
            f"compress={self.compress}": self.compress != "none",
        }
        if self.sharded and any(others.values()):
            other = next(name for name, given in others.items() if given)
            raise BadInput(
                f"strategy allreduce: sharded gives each worker its part of the mean alone, and {other} makes the whole: give one of them"
            )
        if self.overlap and self.compress != "none":
            raise BadInput(
                f"strategy allreduce: overlap sends slices while backward computes, and compress={self.compress} looks at the whole gradient: give one of them"
            )

    @override
    def check_workers(self, workers: int) -> None:
        if self.combine == "adasum" and workers & (workers - 1):
            raise BadInput(
                f"strategy allreduce: combine=adasum takes 1, 2, 4, 8, … workers, and workers={workers}: use as many, or leave combine out"
            )

    @override
    def fixed_members(self) -> str:
        if self.sharded:
            return "with sharded=true the optimizer's state of a part of the parameters is on one worker alone"
        return "combine=adasum takes 2, 4, 8, … workers" if self.combine == "adasum" else ""

    @override
    def whole_replicas(self) -> str:
        if self.combine == "adasum" or self.overlap or self.sharded:
            option = "combine=adasum" if self.combine == "adasum" else "overlap" if self.overlap else "sharded"
            return f"{option} needs the whole gradient on one worker"
        return super().whole_replicas()

    @override
    def start(self, replica: Replica, worker: Worker) -> AllReduceState:
        state = AllReduceState(**compression.remembered(self, replica, worker))
        if self.sharded and worker.mesh.data.size > 1:
            replica.shard_update(worker.mesh.data)
        if self.overlap:

            def begin(gradients: Tensor) -> None:
                state.handles.append(worker.mesh.data.start_mean_(gradients, replica.weight, replica.bits()))

            replica.on_ready(begin)
        return state

    @override
    def forget_step(self, replica: Replica, worker: Worker, state: AllReduceState) -> None:
        state.handles.clear()

    @property
    @override
    def averages_exactly(self) -> bool:
        return self.combine == "mean" and self.compress == "none"

    @override
    def mean_gradients(self, replica: Replica, worker: Worker, state: AllReduceState) -> MeanResult:
        group = worker.mesh.data
        if state.handles:
            return _wait(replica, worker, state)
        if self.sharded and group.size > 1:
            return replica.reduce_scatter_gradients(group)
        if not replica.has_mean and self.compress != "none":
            compression.mean_gradients(self, replica, worker, state)()
        if self.combine == "mean" or group.size == 1 or replica.has_mean:
            return replica.mean_gradients(group)
        if not replica.weight:
            replica.gradients.zero_()
        total = group.mean_(torch.empty(0), replica.weight, replica.bits())
        if total.weight:
            for shard, gradients in zip(replica.shards, replica.gradients.parts, strict=True):
                ends = zip(shard.layout.offsets, shard.layout.sizes, strict=True)
                adasum_(group, gradients, [(start, start + size) for start, size in ends])
        replica.rounds += 1
        return replica.record_mean(total)

    @override
    def exchange(self, replica: Replica, worker: Worker, state: AllReduceState) -> StepResult:
        if self.overlap or self.sharded or self.combine == "adasum" or replica.has_mean:
            self.mean_gradients(replica, worker, state)
        else:
            remember = compression.mean_gradients(self, replica, worker, state)
            if self.compress != "none":  # what is left out is each worker's own: nobody else can give it back

                def commit() -> bool:
                    remember()
                    return replica.apply()

                applied = replica.complete(worker.mesh.data, commit)
                return StepResult(applied=applied, rows_left=replica.control.any_rank_has_rows)
        return StepResult(applied=replica.apply(), rows_left=replica.control.any_rank_has_rows)


def _wait(replica: Replica, worker: Worker, state: AllReduceState) -> MeanResult:
    totals = [handle.wait() for handle in state.handles]
    state.handles.clear()
    bits = 0
    for total in totals:
        bits |= total.bits
    replica.rounds += worker.mesh.data.size > 1
    return replica.record_mean(MeanResult(totals[0].weight, bits))
