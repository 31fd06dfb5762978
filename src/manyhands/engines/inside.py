"""The engine of a process that is a worker already: `train()` called by a script under `manyhands run` or `launch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from manyhands.comm.group import Group
from manyhands.engines.base import Engine, Launch, Observer
from manyhands.errors import BadInput, Unsupported
from manyhands.events import Event
from manyhands.worker import Coordinator, Worker

T = TypeVar("T")


class Gathering(Coordinator):
    """A line to an observer in rank 0's process: other ranks' events wait for `collect`, which is a collective.

    `outer` is the line to the launcher, which goes on hearing of this worker's progress and may ask it to stop.
    """

    def __init__(self, rank: int, observer: Observer, outer: Coordinator) -> None:
        self._rank, self._observer, self._outer = rank, observer, outer
        self._waiting: list[Event] = []

    @override
    def progress(self, phase: str, step: int) -> None:
        self._outer.progress(phase, step)

    @override
    def emit(self, event: Event) -> None:
        if self._rank == 0:
            self._observer.event(event)
        else:
            self._waiting.append(event)

    @override
    def ask(self, event: Event) -> dict[str, Any]:
        return self._observer.answer(event)

    @override
    def collect(self, group: Group) -> None:
        everyone = group.all_gather_json([event.to_json() for event in self._waiting])
        self._waiting.clear()
        if self._rank == 0:
            for lines in everyone:
                for line in lines:
                    self._observer.event(Event.from_json(line))

    @override
    def should_stop(self) -> str:
        return self._outer.should_stop() or (self._observer.stopping() if self._rank == 0 else "")


@dataclass(frozen=True, kw_only=True)
class Inside(Engine):
    """Runs the program on this worker, together with its peers, who make the same call. Returns this rank's value alone."""

    name: ClassVar[str] = "inside"
    in_place: ClassVar[bool] = True
    worker: Worker

    @override
    def launch(self, program: Callable[[Worker], T], plan: Launch) -> list[T]:
        if plan.workers != self.worker.size:
            raise BadInput(
                f"workers={plan.workers} inside a run of {self.worker.size}: leave workers out, the launcher has decided how many there are"
            )
        if plan.server is not None:
            raise Unsupported(
                "a parameter server needs an engine that starts it: call train() outside manyhands run and torchrun"
            )
        line = Gathering(self.worker.rank, plan.observer, self.worker.coordinator)
        return [program(replace(self.worker, coordinator=line))]
