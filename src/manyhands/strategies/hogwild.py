"""Hogwild: all workers step on one piece of memory, without locks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import server_strategy
from manyhands.strategies.base import Change, Leasing, Needs, State, StepResult, Strategy, Traits
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class HogwildState(State):
    """Where members may change: this worker's own memory, in which the parameters of all are while it is the first."""

    memory: list[FlatVector] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy):
    """Lock-free SGD in shared memory.

    Source: Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, Feng Niu, Benjamin Recht,
    Christopher Ré, Stephen J. Wright, 2011.

    1. The parameters of all workers are the same memory.
    2. Each worker computes a gradient there, while others may write to it,
    3. and takes a step of its own optimizer there, without a lock: writes may be lost, and reads may be half old.

    The order of reads and writes is nowhere recorded: such a run cannot be replayed, and no two are the same bits.
    N workers move the parameters N times as far as one.

    Deviations: any optimizer instead of plain SGD, momentum and moments being each worker's own. The paper's analysis
    is for sparse gradients, which rarely touch the same weights; with dense ones every step of one worker meets those
    of the others, which with few workers goes well in practice. Buffers (batch-norm statistics) are each worker's own.
    """

    warmup: int = 0
    """Steps of worker 0 alone at the start of the run; raise it when training is unstable at its beginning."""

    name: ClassVar[str] = "hogwild"
    source: ClassVar[str] = (
        "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, Niu, Recht, Ré, Wright, 2011"
    )
    summary: ClassVar[str] = "nothing: the parameters lie in shared memory"
    consistency: ClassVar[str] = "lock-free"
    needs: ClassVar[Needs] = Needs(one_host=True, elementwise=False)
    traits: ClassVar[Traits] = Traits(lock_free=True)

    def __post_init__(self) -> None:
        server_strategy.check_whole(self.name, 0, warmup=self.warmup)

    @override
    def leasing(self) -> Leasing:
        return Leasing(rank0_warmup_ticks=self.warmup)

    @override
    def rate_factor(self, workers: int) -> float:
        return float(workers)

    @override
    def start(self, replica: Replica, worker: Worker) -> HogwildState:
        return HogwildState(memory=[replica.parameters] if worker.elastic else [])

    @override
    def synchronize(self, replica: Replica, worker: Worker, state: HogwildState, change: Change) -> None:
        """Where members changed, all have the values that were in memory, which may be a lost worker's, and go on in the
        first one's."""
        group, own = worker.mesh.data, state.memory[0] if state.memory else replica.parameters
        if change.first:
            replica.broadcast_from_rank0(group)
        elif group.rank == 0:
            own.copy_(replica.parameters)
        replica.alias_parameters(FlatVector([group.share(part, 0) for part in own.parts]))
        group.barrier()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: State) -> StepResult:
        return StepResult(applied=replica.apply())

    @override
    def consensus(self, replica: Replica, worker: Worker, state: State) -> FlatVector:
        """What lies in memory while nobody steps: a copy, the same on all ranks."""
        worker.mesh.data.barrier()
        vector = replica.parameters.clone()
        worker.mesh.data.barrier()
        return vector
