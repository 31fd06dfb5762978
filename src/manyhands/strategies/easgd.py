"""EASGD: workers explore on their own, tied to a center by an elastic force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.strategies.base import StepResult
from manyhands.strategies.elastic_averaging import Elastic, ElasticState
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class EASGD(Elastic):
    """Elastic averaging SGD.

    Source: Deep learning with Elastic Averaging SGD, Sixin Zhang, Anna Choromanska, Yann LeCun, 2015.

    1. The gradient g is taken at the worker's own parameters x.
    2. Every `period` steps, the elastic difference alpha·(x - center) is taken at that same x, and the center moves by
    it. 3. x becomes x - (the optimizer's step) - the difference.

    The center is the answer: workers never take it over, they are drawn to it. On a server each worker meets the center
    when it comes there (the paper's asynchronous form); with bound=0 or via=group, all differences are taken from one
    center and added up (the synchronous form), and both ways are the same algorithm.

    Deviations: any optimizer instead of plain SGD. The paper exchanges at steps 0, τ, 2τ, …, here at τ, 2τ, … (the
    first would be of nothing); a window that an epoch's end cuts short is closed by an exchange too, without a
    gradient. A worker without rows in a window takes no part in its exchange.
    """

    name: ClassVar[str] = "easgd"
    source: ClassVar[str] = "Deep learning with Elastic Averaging SGD, Zhang, Choromanska, LeCun, 2015"
    summary: ClassVar[str] = "the elastic difference between parameters and center, every `period` steps"

    @override
    def start(self, replica: Replica, worker: Worker) -> ElasticState:
        return self.begin(replica)

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: ElasticState) -> None:
        self.enter(replica, worker, state)

    @override
    def exchange(self, replica: Replica, worker: Worker, state: ElasticState) -> StepResult:
        difference = self.tick(replica, worker, state, replica.parameters)
        applied = replica.apply()
        if difference is not None:
            replica.parameters.sub_(difference)
        return self.result(replica, worker, state, applied)
