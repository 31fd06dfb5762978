"""An ensemble: N models that never talk, and answer together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.strategies.base import VOTE_EVERY, Needs, State, Strategy
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica import Replica


@dataclass(kw_only=True)
class EnsembleState(State):
    ticks: int = 0


@dataclass(frozen=True, kw_only=True)
class Ensemble(Strategy):
    """Every worker trains a model of its own, from its own seed, on its own slices; outputs are averaged.

    Source: Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, Balaji Lakshminarayanan,
    Alexander Pritzel, Charles Blundell, 2017. Deviation: the paper's models all see all rows; here each row is used by
    one model an epoch, as everywhere in manyhands, so give N times the epochs for the paper's setting.

    Parameters are not averaged: the workers' control bits are all that travels, every 64 ticks.
    """

    name: ClassVar[str] = "ensemble"
    source: ClassVar[str] = (
        "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, Lakshminarayanan, Pritzel, Blundell, 2017"
    )
    summary: ClassVar[str] = "nothing: N models, outputs averaged"
    consistency: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs(one_model=False)

    @override
    def start(self, replica: Replica, worker: Worker) -> EnsembleState:
        return EnsembleState()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: EnsembleState) -> bool:
        replica.apply()
        state.ticks += 1
        if state.ticks % VOTE_EVERY:
            return True
        replica.vote(worker.group)
        return replica.anybody_has_rows
