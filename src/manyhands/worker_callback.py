"""The contract of a callback that runs on every worker, where the model is.

Callbacks of `train()` run on the driver, which holds no replica. Code that reads the model between epochs, or leaves
other parameters in it at the end, runs on the workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica
    from manyhands.worker import Worker


class WorkerCallback(ABC):
    """Per-worker callback. All methods are collective except `on_step`."""

    @abstractmethod
    def on_start(self, facts: Mapping[str, Any]) -> None:
        """Before the first step of a launch. facts: the values of the event "start" (docs/events.md)."""

    @abstractmethod
    def on_epoch_start(self, epoch: int) -> None:
        """The replica is as training left it. Called again for an epoch that is resumed."""

    @abstractmethod
    def on_step(self, loss: float | None) -> bool:
        """After each step of this worker; loss is None without rows. True stops all workers together, some steps later."""

    @abstractmethod
    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        """The model holds the consensus, in evaluation mode; its parameters must not change.

        metrics: of the validation at this very step, {} without one. True, the same on all workers, ends the run here.
        """

    @abstractmethod
    def on_end(self) -> Any:
        """The model holds the answer, in evaluation mode; worker 0 may change it. Not called when the run was
        preempted.

        Returns a JSON value; `WorkerCallbackFactory.on_result` receives worker 0's.
        """


class WorkerCallbackFactory(ABC):
    """A task's: creates each worker's callback. It travels to the workers as the task's functions do."""

    @abstractmethod
    def check(self, one_model: bool) -> None:
        """On the driver, before anything starts. one_model: whether the strategy has one answer. Raises Unsupported."""

    @abstractmethod
    def create(self, worker: Worker, replica: Replica) -> WorkerCallback | None:
        """On every worker, when replicas agree, before a checkpoint is read.

        None: no callback, on all workers or on none, as its methods are collective.
        """

    @abstractmethod
    def on_result(self, result: Any) -> None:
        """On the driver, after the run: what `on_end` returned on worker 0."""
