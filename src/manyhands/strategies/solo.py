"""One worker, no exchange: the reference for every other strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.errors import Unsupported
from manyhands.strategies.base import State, Strategy
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

    @override
    def start(self, replica: Replica, worker: Worker) -> State:
        if worker.size > 1:
            raise Unsupported(
                f"strategy solo is one worker, and {worker.size} were asked for: take allreduce, which equals it, or workers=1"
            )
        return State()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: State) -> bool:
        replica.control_bits |= replica.bits()
        replica.apply()
        return replica.more
