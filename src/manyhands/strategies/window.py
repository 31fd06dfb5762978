"""What AGN, DynSGD and Distance share: a worker steps alone for a window, pushes what came of it, and pulls again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import compression, server_strategy
from manyhands.strategies.base import Needs, StepResult, Strategy
from manyhands.strategies.compression import CompressedOverlapState, CompressOptions
from manyhands.strategies.server_strategy import AsyncOptions, Outgoing
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class Window(CompressedOverlapState):
    """A worker's steps since its last pull: it steps alone for a window, pushes the result, and pulls again."""

    start: FlatVector  # the center that it pulled
    ticks: int = 0
    steps: int = 0
    fresh: bool = False  # the next gradient is taken here; else at the center as it is then

    @override
    def merge(self, others: list[Window], rank: int, size: int) -> Window:
        """With another number of ranks, a new window from the center: unpushed updates are lost, except residuals."""
        if len(others) == size:
            return self.follow(others[rank])
        residual = self.shared(others, size, adds=True)
        begins = replace(others[0], residual=residual, ticks=0, steps=0, fresh=False, has_come=False)
        return self.follow(begins)

    def enter(self, replica: Replica, worker: Worker, options: CompressOptions) -> None:
        """Before a gradient: where no window is open, begin one from the center."""
        if not self.fresh:
            compression.pull(options, replica, worker)
            self.start.copy_(replica.parameters)
            self.fresh = True

    def close(self, replica: Replica, worker: Worker, options: CompressOptions, *, divide: bool = False) -> None:
        """Push the sum of the window's steps, or (`divide`) their mean; the next gradient is taken at the center."""
        if self.steps:
            update = self._update(replica, self.start, divide)  # its memory is free until the next pull
            compression.push(options, replica, worker, self, update, since=self.since)
        self.ticks, self.steps, self.fresh = 0, 0, False

    def close_beside(
        self, replica: Replica, worker: Worker, options: CompressOptions, outgoing: Outgoing, *, divide: bool
    ) -> None:
        """The same, while the worker goes on from where it is; its next step lands it."""
        update = self._update(replica, outgoing.update, divide) if self.steps else None
        compression.start_exchange(options, replica, worker, self, update, pull=True)
        self.start.copy_(replica.parameters)
        self.ticks = self.steps = 0

    def land(self, replica: Replica, worker: Worker, options: CompressOptions) -> None:
        """What the step before began is over: the open window goes on from the center, with its own steps on top."""
        self.arrive(worker)
        if self.has_come:
            steps = self.start.subtract_(replica.parameters, self.start)
            compression.take_center(options, replica, self)
            replica.parameters.add_(steps)
            self.start.subtract_(replica.parameters, steps)

    def _update(self, replica: Replica, memory: FlatVector, divide: bool) -> FlatVector:
        update = memory.subtract_(replica.parameters, self.start)
        return update.div_(self.steps) if divide and self.steps > 1 else update


@dataclass(frozen=True, kw_only=True)
class Windowed(AsyncOptions, CompressOptions, Strategy):
    """The steps of all three. Their own files define what is pushed, and the server's rule."""

    window: int
    """Steps between pushes."""

    consistency: ClassVar[str] = "async / bounded"
    needs: ClassVar[Needs] = Needs(before_gradient=True)
    divides: ClassVar[bool]  # a window is pushed as the mean of its steps, not as their sum

    def __post_init__(self) -> None:
        server_strategy.check_whole(self.name, window=self.window)
        server_strategy.check_pace(self.name, self.bound, self.warmup)
        server_strategy.check_overlap(self.name, self.overlaps(), self.bound)
        compression.check(self.name, self)

    @override
    def start(self, replica: Replica, worker: Worker) -> Window:
        overlap = server_strategy.overlapping(replica, self.overlaps())
        return Window(start=replica.zeros(), **compression.remembered(self, replica, worker), **overlap)

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: Window) -> None:
        state.enter(replica, worker, self)

    @override
    def exchange(self, replica: Replica, worker: Worker, state: Window) -> StepResult:
        if not state.steps:
            state.note_center(worker)
        applied = self.step_alone(replica, worker, state)
        state.ticks += 1
        if state.outgoing is not None:
            state.land(replica, worker, self)
            if state.ticks == self.window:
                state.close_beside(replica, worker, self, state.outgoing, divide=self.divides)
        elif state.ticks == self.window:
            state.close(replica, worker, self, divide=self.divides)
        return StepResult(applied=applied)

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: Window, *, extra: bool = False) -> bool:
        applied = replica.apply(extra=extra)
        state.steps += applied
        return applied

    @override
    def steps_since_round(self, state: Window) -> int:
        return state.ticks

    @override
    def settle(self, replica: Replica, worker: Worker, state: Window) -> None:
        state.arrive(worker)

    @override
    def finish(self, replica: Replica, worker: Worker, state: Window) -> None:
        state.land(replica, worker, self)
        state.close(replica, worker, self, divide=self.divides)

    @override
    def consensus(self, replica: Replica, worker: Worker, state: Window) -> FlatVector:
        return compression.center(self, replica, worker)
