"""The step executor of kernels: parameters move without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from manyhands.data.batch import rows_of
from manyhands.errors import BadInput, NotFinite
from manyhands.replica.executor import Allocate, StepExecutor, StepLoss, shards_of
from manyhands.sparse.kernel import Kernel, KernelModel
from manyhands.task import Evaluate, Metrics


class KernelExecutor(StepExecutor):
    """A kernel's tables in one worker. `backward` prepares the rows, `apply` runs the kernel on them, which finds the loss,
    too.

    What a kernel draws follows from the process's own generator, as dropout does: a resumed or replayed run draws the
    same.
    """

    def __init__(self, make_model: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any]) -> None:
        self._make_model, self._make_optimizer = make_model, optimizer
        self._batch: Mapping[str, NDArray[Any]] | None = None  # of this tick
        self._weight = 0.0

    @override
    def build(self, allocate: Allocate) -> None:
        self.model = self._make_model()
        if not isinstance(self.model, KernelModel):
            raise BadInput(f"Kernel.module must give a KernelModel, not a {type(self.model).__name__}")
        self.kernel: Kernel = self.model.kernel
        self.shards = shards_of(self.model, allocate, gradients=False)
        self.optimizer = self._make_optimizer(self.model)
        self._all = (1 << sum(len(shard.layout.names) for shard in self.shards)) - 1

    @override
    def begin_tick(self) -> None:
        self._batch, self._weight = None, 0.0

    @override
    def backward(self, batch: Any | None) -> StepLoss:
        """Prepare the rows. Their loss is not known yet: it is 0 here."""
        if batch is None:
            return StepLoss()
        self._batch = self.kernel.prepare(batch, int(torch.empty((), dtype=torch.int64).random_()))
        self._weight = self.kernel.weight(self._batch, rows_of(batch))
        return StepLoss(weight=self._weight, grad_mask=self._all if self._weight else 0)

    @override
    def clip(self, norm: float) -> None:
        raise self.without_gradients()

    @override
    def apply(self) -> float:
        assert self._batch is not None, "a step without rows weighs nothing, and is not applied"
        assert isinstance(self.model, KernelModel)
        rate = float(self.optimizer.param_groups[0]["lr"])
        loss = self.kernel.step(self.model.tables(), self._batch, rate) / self._weight
        self._batch = None
        if not math.isfinite(loss):
            raise not_finite(self.kernel, loss, rate)
        return loss

    @override
    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        with torch.no_grad():
            return function(self.model, batch)


def not_finite(kernel: Kernel, loss: float, rate: float) -> NotFinite:
    """Of a step whose loss is not: its rows have moved already."""
    return NotFinite(
        f"the loss of kernel {kernel.name} is {loss} at rate {rate:g}: its tables are no longer of use. Lower the rate"
    )
