"""An observer that keeps what it hears."""

from typing import Any

from typing_extensions import override

from manyhands.engines.base import Observer
from manyhands.events import Event


class Heard(Observer):
    """Events, and questions, which all get one answer; asks for a stop as soon as it has a reason."""

    def __init__(self, reason: str = "", **answer: Any) -> None:
        self.events: list[Event] = []
        self.asked: list[Event] = []
        self.log: list[Event] = []  # both, in order
        self.reason, self.reply, self.polls = reason, answer, 0

    @property
    def steps(self) -> list[tuple[int | None, int]]:
        """(rank, step) of all events."""
        return [(event.rank, event.step) for event in self.events]

    @override
    def event(self, event: Event) -> None:
        self.events.append(event)
        self.log.append(event)

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        self.asked.append(event)
        self.log.append(event)
        return self.reply

    @override
    def stopping(self) -> str:
        self.polls += 1
        return self.reason
