"""One worker, no exchange: the reference for every other strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.errors import Unsupported
from manyhands.strategies.base import Needs, State, StepResult, Strategy
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Solo(Strategy):
    """Plain mini-batch training on one worker (A Stochastic Approximation Method, Robbins and Monro, 1951).

    With several workers it raises Unsupported instead of quietly becoming something else.
    """

    name: ClassVar[str] = "solo"
    source: ClassVar[str] = "A Stochastic Approximation Method, Robbins, Monro, 1951"
    summary: ClassVar[str] = "nothing: one worker"
    consistency: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs(one_worker=True)

    @override
    def fixed_members(self) -> str:
        return "it has one worker"

    @override
    def check_workers(self, workers: int) -> None:
        if workers > 1:
            raise Unsupported(
                f"strategy solo runs on one worker, and workers={workers}: use allreduce, which gives the same result, "
                "or workers=1"
            )

    @override
    def start(self, replica: Replica, worker: Worker) -> State:
        return State()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: State) -> StepResult:
        replica.control.received |= replica.control.own
        return StepResult(applied=replica.apply(), rows_left=replica.control.more)
