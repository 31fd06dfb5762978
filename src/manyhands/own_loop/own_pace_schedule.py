"""A scheduler of the user's, where workers go at their own pace: it is stepped by the rows that all have had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.task import named


@dataclass
class PassProgress:
    """How far a pass is over which workers go at their own pace."""

    parts: int  # slices of a global batch
    own: int = 0  # slices that this worker got
    handed: int = 0  # slices that all workers had got by then

    def batches(self, own: int) -> int:
        """Global batches that all workers have had for so many slices of this one's."""
        return own * self.handed // (self.parts * self.own) if self.own else 0


class OwnPaceSchedule:
    """Turns the calls of `scheduler.step()` on this worker into steps of the scheduler.

    Within a pass over a prepared loader each call stands for what this worker has had: c calls over o slices, when all
    have had h slices of a batch's N, are c·h/(N·o) steps. At the pass's end all workers are equally far. A call between
    two passes, or with an argument (a metric, an epoch), is one step, as ever.
    """

    def __init__(self, under_way: Callable[[], PassProgress | None]) -> None:
        """under_way: the pass whose batch is at hand, if there is one."""
        self.calls = 0  # in the pass under way
        self._under_way, self._made = under_way, 0  # steps in it
        self._scheduler: Any = None

    def bind(self, scheduler: LRScheduler) -> None:
        """From now on `scheduler.step()` comes here. Its class is replaced by one of the same name, so that its
        `state_dict()` stays what it was."""
        self._scheduler, kind = scheduler, type(scheduler)
        own = {"_schedule": self, "__module__": kind.__module__}
        scheduler.__class__ = type(kind.__name__, (_AtOwnPace, kind), own)

    def due(self) -> int:
        """A call has come: how many steps it is."""
        progress = self._under_way()
        if progress is None:
            return 1
        self.calls += 1
        due = max(0, progress.batches(self.calls) - self._made)
        self._made += due
        return due

    def end_pass(self, steps: int) -> None:
        """All workers have made so many steps in the pass that is over."""
        for _ in range(steps - self._made):
            self._scheduler.step()  # no pass is under way: each is one
        self.calls = self._made = 0


class _AtOwnPace(LRScheduler):
    """Before a scheduler's own class."""

    _schedule: ClassVar[OwnPaceSchedule]

    @override
    def step(self, *arguments: Any, **options: Any) -> None:
        if arguments or options:
            super().step(*arguments, **options)
            return
        for _ in range(self._schedule.due()):
            super().step()


def check_scheduler(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """BadInput for a scheduler of another optimizer."""
    if scheduler.optimizer is not optimizer:
        raise BadInput(
            f"the {named(scheduler)} is of another optimizer than the one that is prepared: build it over that one, "
            f"{type(scheduler).__name__}(optimizer, ...), and prepare both in one call"
        )
