from __future__ import annotations

from dataclasses import replace
from typing import Any

from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.base import Observer
from manyhands.engines.in_process import InProcessDriverClient
from manyhands.events import Event


class Counting(Observer):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.polls = 0
        self.reason = ""

    def event(self, event: Event) -> None:
        self.events.append(event)

    def answer(self, event: Event) -> dict[str, Any]:
        return {"step": event.step}

    def stopping(self) -> str:
        self.polls += 1
        return self.reason


def test_events_and_questions_go_straight_to_the_observer() -> None:
    observer = Counting()
    line = InProcessDriverClient(observer)
    line.emit(Event(type="step", step=1))
    assert line.ask(Event(type="lease", step=2)) == {"step": 2}
    assert observer.events == [Event(type="step", step=1)]


def test_the_observer_is_asked_ten_times_a_second() -> None:
    observer, now = Counting(), 0.0
    line = InProcessDriverClient(observer, clock=lambda: now)
    for tick in range(1000):  # ten seconds
        now = tick / 100
        line.should_stop()
    assert 90 <= observer.polls <= 101


def test_a_reason_to_stop_stays() -> None:
    observer, now = Counting(), 0.0
    line = InProcessDriverClient(observer, clock=lambda: now)
    observer.reason = "callback"
    assert line.should_stop() == "callback"
    observer.reason, now = "", 5.0
    assert line.should_stop() == "callback"


SEGMENT = Segment(epoch=0, first=0, until=100, parts=2)


def test_one_worker_gets_every_slice_once() -> None:
    line = InProcessDriverClient(Counting())
    leases = [line.lease(replace(SEGMENT, until=2)) for _ in range(5)]
    slices = [(lease.index, lease.part) for lease in leases if isinstance(lease, Lease)]
    assert sorted(slices) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert isinstance(leases[-1], End)
    assert leases[-1].reason == ""


def test_a_stop_ends_the_leases() -> None:
    observer, now = Counting(), 0.0
    line = InProcessDriverClient(observer, clock=lambda: now)
    assert isinstance(line.lease(SEGMENT), Lease)
    observer.reason, now = "preempted", 1.0
    end = line.lease(SEGMENT)
    assert isinstance(end, End)
    assert end.reason == "preempted"
    assert sum(back - front for front, back in end.left) == 199
