"""Local SGD: workers step alone, and average their parameters every `period` steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from manyhands.errors import BadInput, is_whole
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.base import State, StepResult, Strategy, Traits
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class LocalSGDState(State):
    """The open window: what happened since the last average."""

    ticks: int = 0
    weight: float = 0.0
    grad_mask: int = 0  # bits: parameters stepped in this window
    memory: list[FlatVector] = field(default_factory=list)  # one for the mean, where members may change

    @override
    def merge(self, others: list[LocalSGDState], rank: int, size: int) -> LocalSGDState:
        """A fresh window: the mean that the ranks go on from closed theirs."""
        return others[rank] if len(others) == size else LocalSGDState(memory=self.memory)

    @override
    def taken_over(self) -> LocalSGDState:
        """This worker has no steps of its own in the open window."""
        return replace(self, weight=0.0, grad_mask=0)

    @override
    def weight_of_window(self) -> float:
        return self.weight


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy):
    """Periodic parameter averaging.

    Source: Local SGD Converges Fast and Communicates Little, Sebastian U. Stich, 2019; with `warmup`, post-local SGD of
    Don't Use Large Mini-Batches, Use Local SGD, Tao Lin, Sebastian U. Stich, Kumar Kshitij Patel, Martin Jaggi, 2020.

    1. Every worker takes `period` steps of its own optimizer on its own slices.
    2. All parameters are replaced by their mean, weighted by what the loss counted in the window.

    Deviations: weights (the papers have equal shards), the optimizer's state, and a last, shorter window at an epoch's
    end. Averaging after one SGD step equals one large-batch step; for Adam it does not.
    """

    period: int | Literal["end"] = 8
    """Steps between averages; `end`: one average, at the end. Raise it if exchange takes long."""
    optimizer_state: Literal["averaged", "kept", "reset"] = "averaged"
    """Momentum and moments at an average: averaged too (as many bytes again per vector), kept, or reset."""
    warmup: int = 0
    """Steps of all-reduce before the first window; raise it when training is unstable at the start."""

    name: ClassVar[str] = "local-sgd"
    source: ClassVar[str] = "Local SGD Converges Fast and Communicates Little, Stich, 2019"
    summary: ClassVar[str] = "parameters (and optimizer state), every `period` steps"
    consistency: ClassVar[str] = "periodic"
    traits: ClassVar[Traits] = Traits(period="period")

    def __post_init__(self) -> None:
        if self.period != "end" and not is_whole(self.period, 1):
            raise BadInput(
                f"strategy local-sgd: period must be a whole number of at least 1, or end; not {self.period!r}"
            )
        if self.optimizer_state not in (known := ("averaged", "kept", "reset")):
            raise BadInput(
                f"strategy local-sgd: optimizer_state must be one of {', '.join(known)}, not {self.optimizer_state!r}"
            )
        if not is_whole(self.warmup, 0):
            raise BadInput(f"strategy local-sgd: warmup must be a whole number of 0 or more, not {self.warmup!r}")

    @override
    def exchanges_gradients(self) -> str:
        return f"with warmup={self.warmup} averages gradients at first" if self.warmup else ""

    @override
    def fixed_members(self) -> str:
        return "with period=end its workers exchange once, at the end" if self.period == "end" else ""

    @override
    def start(self, replica: Replica, worker: Worker) -> LocalSGDState:
        return LocalSGDState(memory=[replica.zeros()] if worker.elastic else [])

    @override
    def exchange(self, replica: Replica, worker: Worker, state: LocalSGDState) -> StepResult:
        if replica.tick < self.warmup:
            replica.mean_gradients(worker.mesh.data)
            applied = replica.complete(worker.mesh.data, replica.apply, steps=True)
            return StepResult(applied=applied, rows_left=replica.control.any_rank_has_rows)
        applied = self.step_alone(replica, worker, state)
        state.ticks += 1
        exchanged = state.ticks == self.period
        if exchanged:
            self._average(replica, worker, state)
        return StepResult(applied=applied, rows_left=replica.control.rows_left(worker, exchanged))

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: LocalSGDState, *, extra: bool = False) -> bool:
        weight, applied = replica.weight, replica.apply(extra=extra)
        if applied:
            state.weight += weight
            state.grad_mask |= replica.grad_mask
        return applied

    @override
    def steps_since_round(self, state: LocalSGDState) -> int:
        return state.ticks

    @override
    def finish(self, replica: Replica, worker: Worker, state: LocalSGDState) -> None:
        if state.ticks and (self.period != "end" or replica.last):
            self._average(replica, worker, state)

    @override
    def agreed(self, replica: Replica, state: LocalSGDState) -> FlatVector | None:
        return None if state.ticks else replica.parameters

    @override
    def consensus(self, replica: Replica, worker: Worker, state: LocalSGDState) -> FlatVector:
        if not state.ticks:
            return replica.parameters
        mean = replica.parameters.clone()
        mean.mean_(worker.mesh.data, state.weight)
        return mean

    def _average(self, replica: Replica, worker: Worker, state: LocalSGDState) -> None:
        group, elastic = worker.mesh.data, worker.elastic
        mean = state.memory[0].copy_(replica.parameters) if elastic else replica.parameters
        total = replica.mean_(group, mean, state.weight, state.grad_mask)
        take_over = None
        if total.weight and self.optimizer_state == "averaged":
            take_over = replica.optimizer_state.mean(group, state.weight, total.bits, copies=elastic)

        def close() -> None:
            replica.set_parameters(mean)
            if take_over is not None:
                take_over()
            elif total.weight and self.optimizer_state == "reset" and group.size > 1:
                replica.optimizer_state.reset()
            state.ticks, state.weight, state.grad_mask = 0, 0.0, 0

        replica.complete(group, close)
