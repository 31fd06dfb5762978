"""The one answer of a run: validated while it trains, and brought back at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from manyhands import evaluation
from manyhands.comm.solo import SoloGroup
from manyhands.data.feed import Feed
from manyhands.plan import Place, Plan, State
from manyhands.replica import Replica
from manyhands.strategies.base import State as StrategyState
from manyhands.worker import Worker


@dataclass
class Judge:
    """Metrics of the consensus; everything here is a collective."""

    plan: Plan
    worker: Worker
    replica: Replica
    validation: Feed | None
    test: Feed | None
    judged: int = -1  # the tick of the newest validation

    def validate(self, place: Place, state: StrategyState) -> tuple[dict[str, float], bool]:
        """Validation metrics of the consensus as it is now, offered to `keep`; ({}, False) without validation data."""
        if self.validation is None:
            return {}, False
        self.judged = place.tick
        consensus = self.plan.strategy.consensus(self.replica, self.worker, state)
        buffers = self._buffers()
        metrics = self._evaluate(self.validation, consensus, buffers, "validation_")
        return metrics, self.plan.keep.offer(metrics, consensus, buffers)

    def answer(self, state: StrategyState, test: bool) -> tuple[list[State], dict[str, float]]:
        """The consensus, or the best that was kept, where it is wanted, and its metrics."""
        keep = self.plan.keep
        consensus = self.plan.strategy.consensus(self.replica, self.worker, state)
        buffers = self._buffers()
        metrics = dict(keep.newest)
        if keep.parameters is not None:
            consensus, buffers, metrics = keep.parameters, keep.buffers, dict(keep.metrics)
        if self.test is not None and test:
            metrics |= self._evaluate(self.test, consensus, buffers, "test_")
        return self._states(consensus, buffers), metrics

    def _buffers(self) -> dict[str, Tensor]:
        """Those of the one answer, or this rank's own where there are N."""
        group = self.worker.group if self.plan.strategy.needs.one_model else SoloGroup()
        return evaluation.mean_buffers(self.replica.model, group)

    def _evaluate(self, feed: Feed, parameters: Tensor, buffers: dict[str, Tensor], prefix: str) -> dict[str, float]:
        worker = self.worker

        def progress(batch: int) -> None:
            worker.coordinator.progress("validation", batch)

        with evaluation.holding(self.replica, parameters, buffers) as model:
            judged = model if self.plan.strategy.needs.one_model else evaluation.ensemble_of(self.replica, worker.group)
            metrics = evaluation.evaluate(self.plan.task, judged, feed, worker.group, progress)
        return {prefix + name: value for name, value in metrics.items()}

    def _states(self, parameters: Tensor, buffers: dict[str, Tensor]) -> list[State]:
        """On the ranks that want them: the answer's values, or each ensemble member's, on the CPU, in memory of their own."""
        wanted = self.worker.rank == 0 or self.plan.everywhere
        if self.plan.strategy.needs.one_model:
            return [(_own(self.replica.named(parameters)), _own(buffers))] if wanted else []
        with evaluation.holding(self.replica, parameters, buffers):
            members = evaluation.ensemble_of(self.replica, self.worker.group).members
        trainable = self.replica.layout.names
        states = [({n: p for n, p in m.named_parameters() if n in trainable}, dict(m.named_buffers())) for m in members]
        return [(_own(p), _own(b)) for p, b in states] if wanted else []


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
