"""EAMSGD: EASGD whose workers have Nesterov momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.base import StepResult
from manyhands.strategies.elastic_averaging import Elastic, ElasticState
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class MomentumState(ElasticState):
    """And the worker's momentum."""

    velocity: FlatVector
    before: FlatVector  # the parameters before they looked ahead


@dataclass(frozen=True, kw_only=True)
class EAMSGD(Elastic):
    """Elastic averaging momentum SGD.

    Source: Deep learning with Elastic Averaging SGD, Sixin Zhang, Anna Choromanska, Yann LeCun, 2015.

    1. The gradient g is taken ahead of the worker's own parameters x: at x + momentum·v.
    2. v becomes momentum·v - (the optimizer's step for g).
    3. At a worker's steps 0, `period`, 2·`period`, …, the elastic difference alpha·(x - center) is taken at x, and the
    center moves by it.
    4. x becomes x + v - the difference.

    As with `easgd`, the center is the answer. With momentum the worker moves 1 / (1 - momentum) times as far for each
    gradient: the summary's effective rate says so.

    Deviations: those of `easgd`. The momentum stands beside whatever the task's optimizer does by itself: give it an
    optimizer without momentum for the paper's algorithm.
    """

    momentum: float = 0.5
    """The paper's δ. Raise it with plain SGD (the paper: 0.99 at a lower rate); lower it if the loss explodes."""

    name: ClassVar[str] = "eamsgd"
    source: ClassVar[str] = "Deep learning with Elastic Averaging SGD, Zhang, Choromanska, LeCun, 2015"
    summary: ClassVar[str] = "as easgd, with Nesterov momentum on each worker"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise BadInput(f"strategy eamsgd: momentum must be 0 or more and below 1, not {self.momentum!r}")

    @override
    def rate_factor(self, workers: int) -> float:
        return 1 / (1 - self.momentum)

    @override
    def start(self, replica: Replica, worker: Worker) -> MomentumState:
        return MomentumState(**vars(self.begin(replica)), velocity=replica.zeros(), before=replica.zeros())

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: MomentumState) -> None:
        self.enter(replica, worker, state)
        state.before.copy_(replica.parameters)
        replica.parameters.add_(state.velocity, alpha=self.momentum)

    @override
    def exchange(self, replica: Replica, worker: Worker, state: MomentumState) -> StepResult:
        return self.exchange_at(state.before, replica, worker, state)

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: MomentumState, *, extra: bool = False) -> bool:
        applied = super().step_alone(replica, worker, state, extra=extra)
        if applied:
            state.velocity.copy_(replica.parameters).sub_(state.before)
        else:
            replica.parameters.copy_(state.before)
        return applied

    @override
    def forget_step(self, replica: Replica, worker: Worker, state: MomentumState) -> None:
        replica.parameters.copy_(state.before)
