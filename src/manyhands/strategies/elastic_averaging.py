"""What EASGD and EAMSGD share: the elastic force between workers and a center, over a server or over the group."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import ServerSpec
from manyhands.strategies import server_strategy
from manyhands.strategies.base import Change, Leasing, Needs, StepResult, Strategy, Traits, server_of
from manyhands.strategies.server_strategy import AsyncOptions, Outgoing, OverlapState
from manyhands.units import count
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica

T = TypeVar("T")

BETA = 0.9  # the paper's β = N·α: the share of its distance from the workers' mean that the center moves


@dataclass(kw_only=True)
class ElasticState(OverlapState):
    """The ticks since the last exchange; and the center, where the group keeps it."""

    center: FlatVector  # via group, the same on all ranks; [0] via server
    ticks: int = 0
    moved: bool = False  # this worker has had rows since it last took part
    inside: bool = False  # this worker has begun, at the center as it was then
    memory: list[FlatVector] = field(default_factory=list)  # one that the group sums in

    @override
    def merge(self, others: list[ElasticState], rank: int, size: int) -> ElasticState:
        """With another number of ranks, a new window: via server from the center, via group from the mean."""
        if len(others) == size:
            return self.follow(replace(others[rank], memory=self.memory))
        begins = replace(others[0], ticks=0, moved=False, inside=False, has_come=False, memory=self.memory)
        return self.follow(begins)


@dataclass(frozen=True, kw_only=True)
class Elastic(AsyncOptions, Strategy):
    """The options and the exchange of both. Their own files define where in a step it comes."""

    period: int = 4
    """Steps between exchanges (the paper's τ). Raise it when exchange takes long: the replicas explore more; lower it
    when the center learns slowly."""
    alpha: float | None = None
    """How strongly a worker and the center attract each other at an exchange; none is 0.9 / N, so that all N together
    move the center by 0.9 of its distance from their mean. Raise it when the replicas drift apart, lower it when the
    center oscillates."""
    via: Literal["server", "group"] = "server"
    """Where the center lies: on a server, each worker at its own pace; or on every rank, with all in step. Take `group`
    where there is no server, or where runs are to be the same bit for bit."""

    consistency: ClassVar[str] = "elastic"
    needs: ClassVar[Needs] = Needs(before_gradient=True)
    traits: ClassVar[Traits] = Traits(period="period", follows=True, exchanges_next=True)

    def __post_init__(self) -> None:
        server_strategy.check_whole(self.name, period=self.period)
        server_strategy.check_pace(self.name, self.bound, self.warmup)
        server_strategy.check_overlap(self.name, self.overlaps(), self.bound)
        if self.alpha is not None and not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise BadInput(f"strategy {self.name}: alpha must be a number above 0, or none; not {self.alpha!r}")
        if self.via not in ("server", "group"):
            raise BadInput(f"strategy {self.name}: via must be server or group, not {self.via!r}")
        if self.via == "group" and (self.bound is not None or self.warmup):
            raise BadInput(
                f"strategy {self.name}: bound and warmup have no effect with via=group, where all workers are in step: "
                "leave them out, or give via=server"
            )
        if self.via == "group" and self.overlaps():
            raise BadInput(
                f"strategy {self.name}: overlap=true is for a server, and with via=group all workers are in step: leave "
                "overlap out, or give via=server"
            )

    @override
    def server(self) -> ServerSpec | None:
        return ServerSpec(rule="elastic", bound=self.bound) if self.via == "server" else None

    @override
    def leasing(self) -> Leasing | None:
        return super().leasing() if self.via == "server" else None

    def begin(self, replica: Replica) -> ElasticState:
        """The fields that both remember."""
        if self.via == "server":
            overlap = server_strategy.overlapping(replica, self.overlaps())
            return ElasticState(center=replica.parameters.between(0, 0).clone(), **overlap)
        return ElasticState(center=replica.parameters.clone(), memory=[replica.zeros()])

    @override
    def synchronize(self, replica: Replica, worker: Worker, state: ElasticState, change: Change) -> None:
        """Workers and center start at rank 0's parameters; warns of an alpha that no rate makes stable."""
        self._warn(worker)
        super().synchronize(replica, worker, state, change)
        if self.via == "group" and change.first:
            state.center.copy_(replica.parameters)

    def enter(self, replica: Replica, worker: Worker, state: ElasticState) -> None:
        """Before a worker's first gradient: the center may have moved since `begin`, while another trained alone."""
        if self.via == "server" and not state.inside:
            server_strategy.pull(replica, worker)
        state.inside = True

    def exchange_at(self, x: FlatVector, replica: Replica, worker: Worker, state: ElasticState) -> StepResult:
        """`exchange`; where a period is over, with the elastic difference of x, the parameters as the tick found them."""
        due = state.ticks >= self.period
        self._land(replica, worker, state)

        def step(difference: FlatVector | None) -> bool:
            state.ticks = 1 if due else state.ticks + 1
            applied = self.step_alone(replica, worker, state)
            if difference is not None:
                replica.parameters.sub_(difference)
            return applied

        takes_part = state.moved and replica.weight > 0
        if due and takes_part and state.outgoing is not None:
            self._start(x, replica, worker, state, state.outgoing)
            applied = step(None)
        else:
            applied = self._meet(x, takes_part, replica, worker, state, step) if due else step(None)
        if self.via == "server":
            return StepResult(applied=applied)
        return StepResult(applied=applied, rows_left=replica.control.rows_left(worker, due))

    @override
    def pushes_until_next(self, replica: Replica, state: ElasticState) -> int:
        """An exchange takes the parameters as its step finds them."""
        return 2 if state.ticks >= self.period and state.moved else 1

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: Any, *, extra: bool = False) -> bool:
        state.moved = state.moved or replica.weight > 0
        return replica.apply(extra=extra)

    @override
    def steps_since_round(self, state: ElasticState) -> int:
        return state.ticks

    @override
    def settle(self, replica: Replica, worker: Worker, state: ElasticState) -> None:
        state.arrive(worker)

    @override
    def finish(self, replica: Replica, worker: Worker, state: ElasticState) -> None:
        """Close a window that was cut short. The exchange of a whole one comes with the next step."""

        def close(difference: FlatVector | None) -> None:
            if difference is not None:
                replica.parameters.sub_(difference)
            state.ticks = 0

        self._land(replica, worker, state)
        if 0 < state.ticks < self.period:
            self._meet(replica.parameters, state.moved, replica, worker, state, close)

    @override
    def consensus(self, replica: Replica, worker: Worker, state: ElasticState) -> FlatVector:
        return server_strategy.center(replica, worker) if self.via == "server" else state.center

    def _start(self, x: FlatVector, replica: Replica, worker: Worker, state: ElasticState, outgoing: Outgoing) -> None:
        """Begin an exchange of x; the next step lands it."""
        server_of(worker).start_exchange(outgoing.update.copy_(x).joined(), self._alpha(worker.mesh.data.size))
        state.moved = False
        replica.rounds += 1

    def _land(self, replica: Replica, worker: Worker, state: ElasticState) -> None:
        """What the step before began is over: the difference is taken off where the parameters are now."""
        state.arrive(worker)
        if state.has_come:
            difference = replica.parameters.empty_like()
            assert state.coming is not None
            difference.take_joined_(state.coming)
            replica.parameters.sub_(difference)
            state.has_come = False

    def _meet(
        self,
        x: FlatVector,
        takes_part: bool,
        replica: Replica,
        worker: Worker,
        state: ElasticState,
        then: Callable[[FlatVector | None], T],
    ) -> T:
        """`then`, of alpha·(x - center), by which the center has moved; of None for a worker that takes no part."""
        group, alpha = worker.mesh.data, self._alpha(worker.mesh.data.size)
        if self.via == "server":
            if not takes_part:
                return then(None)
            state.moved = False
            replica.rounds += 1
            return then(server_strategy.answer_of(server_strategy.push(replica, worker, x, alpha), replica))
        mine = alpha * (x - state.center) if takes_part else None
        everyone = None
        if replica.sum_weights(group, float(mine is not None)):
            everyone = state.memory[0]
            everyone.copy_(mine) if mine is not None else everyone.zero_()
            everyone.all_reduce_(group)

        def move() -> T:
            if everyone is not None:
                state.center.add_(everyone)
            state.moved = state.moved and not takes_part
            return then(mine)

        return replica.complete(group, move)

    def _alpha(self, workers: int) -> float:
        return BETA / workers if self.alpha is None else self.alpha

    def _warn(self, worker: Worker) -> None:
        """The stability limits for small steps; a curvature λ lowers both, see docs/strategies/easgd.md."""
        in_step = self.leasing() is None
        limit = 2 / (worker.mesh.data.size + 1) if in_step else 1.0
        alpha = self._alpha(worker.mesh.data.size)
        if worker.rank == 0 and alpha > limit:
            where = (
                f"with {count(worker.mesh.data.size, 'worker')} in step"
                if in_step
                else "with workers at their own pace"
            )
            worker.emit(
                "warning",
                message=f"strategy {self.name}: alpha={alpha:g} is above {limit:.4g}, so the center is unstable "
                f"{where} at any learning rate: lower alpha, or leave it out "
                f"(then it is {BETA / worker.mesh.data.size:.4g})",
            )
