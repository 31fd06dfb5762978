"""A companion: the user's own code beside the loop on the workers, where the model is.

Callbacks of `train()` run on the driver, which holds no replica. What must see the model between epochs, or leave other
parameters in it at the end, goes along with the workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica
    from manyhands.worker import Worker


class WorkerCallback(ABC):
    """What goes along with one worker. All workers call each method together, in this order; `ticked` each for itself."""

    @abstractmethod
    def begin(self, facts: Mapping[str, Any]) -> None:
        """Before the first tick of a launch. facts: the values of the event "start" (docs/events.md)."""

    @abstractmethod
    def epoch_begins(self, epoch: int) -> None:
        """The replica is as training left it. A resumed epoch begins again."""

    @abstractmethod
    def ticked(self, loss: float | None) -> bool:
        """This worker made a tick; None: without rows. True: all workers shall stop, which they do together, some ticks later."""

    @abstractmethod
    def epoch_ends(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        """The model holds the consensus, in evaluation mode, and its parameters are to be left as they are.

        metrics: of the validation at this very tick, {} without one. True, the same on all workers: the run ends here.
        """

    @abstractmethod
    def end(self) -> Any:
        """The model holds the answer, in evaluation mode; what worker 0 leaves in it is the answer. Not called when preempted.

        Returns what JSON holds; `WorkerCallbackFactory.hear` gets worker 0's.
        """


class WorkerCallbackFactory(ABC):
    """A task's: makes each worker its companion. Goes to the workers as the task's functions do."""

    @abstractmethod
    def check(self, one_model: bool) -> None:
        """On the driver, before anything starts. one_model: whether the strategy has one answer. Raises Unsupported."""

    @abstractmethod
    def join(self, worker: Worker, replica: Replica) -> WorkerCallback | None:
        """On every worker, when replicas agree, before a checkpoint is read. None: nobody goes along."""

    @abstractmethod
    def hear(self, said: Any) -> None:
        """On the driver, after the run: what `end` returned on worker 0."""
