"""EASGD: workers explore on their own, tied to a center by an elastic force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.strategies.base import StepResult
from manyhands.strategies.elastic_averaging import Elastic, ElasticState
from manyhands.strategies.server_strategy import OverlapOptions
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class EASGD(Elastic, OverlapOptions):
    """Elastic averaging SGD.

    Source: Deep learning with Elastic Averaging SGD, Sixin Zhang, Anna Choromanska, Yann LeCun, 2015.

    1. The gradient g is taken at the worker's own parameters x.
    2. At a worker's steps 0, `period`, 2·`period`, …, counted from 0, the elastic difference alpha·(x - center) is
    taken at that same x, and the center moves by it.
    3. x becomes x - (the optimizer's step) - the difference.

    The center is the answer: workers never take it over, they are drawn to it. On a server each worker meets the center
    when it comes there (the paper's asynchronous form); with bound=0 or via=group, all differences are taken from one
    center and added up (the synchronous form), and both ways are the same algorithm.

    At step 0 a worker stands at the center, so that nothing is sent. The steps after a run's last exchange are in no
    center, as in the paper.

    Deviations: any optimizer instead of plain SGD. A window of fewer than `period` steps at an epoch's end is closed by
    an exchange without a gradient, from which steps are then counted: otherwise short epochs would not reach the
    center. A worker takes part in an exchange only with rows in that step and in the window before it. With `overlap` a
    worker goes on while its exchange is under way, and takes the difference off one gradient later.
    """

    name: ClassVar[str] = "easgd"
    source: ClassVar[str] = "Deep learning with Elastic Averaging SGD, Zhang, Choromanska, LeCun, 2015"
    summary: ClassVar[str] = "the elastic difference between parameters and center, every `period` steps"

    @override
    def overlaps(self) -> bool:
        return self.overlap

    @override
    def start(self, replica: Replica, worker: Worker) -> ElasticState:
        return self.begin(replica)

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: ElasticState) -> None:
        self.enter(replica, worker, state)

    @override
    def exchange(self, replica: Replica, worker: Worker, state: ElasticState) -> StepResult:
        return self.exchange_at(replica.parameters, replica, worker, state)
