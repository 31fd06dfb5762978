"""Leader: workers step alone, and every `period` steps take over what worker 0 has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import server_strategy
from manyhands.strategies.base import State, StepResult, Strategy, Traits
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class LeaderState(State):
    """The open window."""

    ticks: int = 0


@dataclass(frozen=True, kw_only=True)
class Leader(Strategy):
    """Broadcast of one worker's parameters: an example, not an algorithm to use.

    1. Every worker takes `period` steps of its own optimizer on its own slices.
    2. All take over worker 0's parameters; what the others did is lost.
    """

    period: int = 8
    """Steps between broadcasts. Raise it if exchange takes long."""

    name: ClassVar[str] = "leader"
    source: ClassVar[str] = "an example"
    summary: ClassVar[str] = "worker 0's parameters, every `period` steps"
    consistency: ClassVar[str] = "periodic"
    traits: ClassVar[Traits] = Traits(period="period")

    def __post_init__(self) -> None:
        server_strategy.check_whole(self.name, period=self.period)

    @override
    def start(self, replica: Replica, worker: Worker) -> LeaderState:
        return LeaderState()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: LeaderState) -> StepResult:
        applied = replica.apply()
        state.ticks += 1
        if state.ticks == self.period:
            self.finish(replica, worker, state)
        synced = replica.control.sync_if_due(worker)
        return StepResult(applied=applied, rows_left=replica.control.any_rank_has_rows if synced else True)

    @override
    def finish(self, replica: Replica, worker: Worker, state: LeaderState) -> None:
        if state.ticks:
            replica.rounds += worker.mesh.data.size > 1
            replica.parameters.broadcast_(worker.mesh.data, 0)
            state.ticks = 0

    @override
    def agreed(self, replica: Replica, state: LeaderState) -> FlatVector | None:
        return None if state.ticks else replica.parameters

    @override
    def consensus(self, replica: Replica, worker: Worker, state: LeaderState) -> FlatVector:
        answer = replica.parameters.clone()
        answer.broadcast_(worker.mesh.data, 0)
        return answer
