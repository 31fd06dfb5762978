"""Step executors of the tests' own: one that moves parameters without gradients, and one of half a replica."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from by_hand import Point
from torch import Tensor, nn

from manyhands.comm.group import Group
from manyhands.replica.executor import Allocate, AutogradExecutor, StepExecutor, StepLoss, shards_of
from manyhands.replica.shard import ParameterSlice
from manyhands.task import Evaluate, Metrics


class MovesToRows(StepExecutor):
    """A step goes a part of the way, as long as the rate says, from the parameters to the mean of the rows."""

    def __init__(self, start: list[float], rate: float) -> None:
        self._start, self._rate = start, rate

    def build(self, allocate: Allocate) -> None:
        self.model: nn.Module = Point(self._start)
        self.shards = shards_of(self.model, allocate)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self._rate)

    def begin_tick(self) -> None:
        self.rows: Tensor | None = None

    def backward(self, batch: Any | None) -> StepLoss:
        self.rows = batch
        return StepLoss() if batch is None else StepLoss(weight=len(batch), grad_mask=1)

    def clip(self, norm: float) -> None:
        raise AssertionError("nothing to clip")

    def apply(self) -> None:
        assert self.rows is not None
        w = self.shards[0].parameters[: len(self._start)]
        w.lerp_(self.rows.mean(0), self.optimizer.param_groups[0]["lr"])

    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        return function(self.model, batch)


def distance(model: nn.Module, batch: Tensor) -> Tensor:
    """Sums over the columns: halves of it add up to the whole, and so do their gradients."""
    mean: Tensor = (model.w - batch).square().sum(1).mean()
    return mean


class Half(AutogradExecutor):
    """This member's half of the columns; what all members must know alike is reduced."""

    def __init__(
        self, members: Group, start: list[float], optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> None:
        size = len(start)
        self.columns = slice(members.rank * size // 2, (members.rank + 1) * size // 2)
        self._slice = ParameterSlice(shape=(size,), start=(self.columns.start,), stop=(self.columns.stop,))

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            return distance(model, batch[:, self.columns])

        super().__init__(lambda: Point(start[self.columns]), optimizer, loss=loss, members=members)

    def build(self, allocate: Allocate) -> None:
        super().build(allocate)
        self.shards[0].slices["w"] = self._slice

    def backward(self, batch: Any | None) -> StepLoss:
        found = super().backward(batch)
        return replace(found, loss=float(self.reduce(torch.tensor([found.loss], dtype=torch.float64))))

    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        own = super().evaluate(function, batch[:, self.columns])
        assert isinstance(own["loss"], Tensor)
        return {**own, "loss": self.reduce(own["loss"].double().reshape(1))[0]}
