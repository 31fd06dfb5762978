"""An ensemble: N models that never exchange anything; their outputs are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.errors import Unsupported
from manyhands.strategies.base import Needs, State, StepResult, Strategy
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class EnsembleState(State):
    """Nothing to remember: every rank is its own."""

    @override
    def merge(self, others: list[EnsembleState], rank: int, size: int) -> EnsembleState:
        """Raises Unsupported for another number of ranks: a mean of models that never talked is no model."""
        if len(others) != size:
            raise Unsupported(
                f"an ensemble of {len(others)} cannot go on with {size} worker{'' if size == 1 else 's'}, because each trains a model of "
                f"its own: resume with workers={len(others)}, or start in another run directory"
            )
        return others[rank]


@dataclass(frozen=True, kw_only=True)
class Ensemble(Strategy):
    """Every worker trains a model of its own, from its own seed, on its own slices; outputs are averaged.

    Source: Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, Balaji Lakshminarayanan,
    Alexander Pritzel, Charles Blundell, 2017. Deviation: the paper's models all see all rows; here each row is used by
    one model an epoch, as everywhere in manyhands, so give N times the epochs for the paper's setting.

    Parameters are not averaged: the workers' control bits are all that travels, about once a second.
    """

    name: ClassVar[str] = "ensemble"
    source: ClassVar[str] = (
        "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, Lakshminarayanan, Pritzel, Blundell, 2017"
    )
    summary: ClassVar[str] = "nothing: N models, outputs averaged"
    consistency: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs(one_model=False)

    @override
    def fixed_members(self) -> str:
        return "each of its workers trains a model of its own"

    @override
    def start(self, replica: Replica, worker: Worker) -> EnsembleState:
        return EnsembleState()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: EnsembleState) -> StepResult:
        return StepResult(applied=replica.apply(), rows_left=replica.control.rows_left(worker))
