"""Schedules of what goes wrong, under each of which a small system must keep its promises.

A system is a check of a schedule: it runs the schedule, and raises where a promise is broken. A schedule is a value that a seed
draws, or the world that it begins; what `keeps` raises says which one it was, and so how to have the failure again.
"""

import heapq
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar

LATE_S = (0.001, 0.01, 0.05, 0.3)


class Broken(AssertionError):
    """A promise was broken."""


def expect(holds: object, message: str) -> None:
    if not holds:
        raise Broken(message)


def keeps(check: Callable[[Any], object], schedules: Iterable[Any]) -> None:
    """Nothing is broken under any of them."""
    for schedule in schedules:
        try:
            check(schedule)
        except Exception as error:
            error.add_note(f"repeat with: {check.__qualname__}({schedule!r})")
            raise


def first_broken(check: Callable[[Any], object], schedules: Iterable[Any]) -> Any:
    """The first schedule that breaks the system, in which a bug was planted; the search must find one."""
    number = 0
    for schedule in schedules:
        number += 1
        try:
            check(schedule)
        except Exception:  # noqa: BLE001 - what breaks depends on the bug
            return schedule
    raise Broken(f"the bug was not found in {number} schedules")


class World:
    """Events in virtual time, which a seed draws; messages are late by chance."""

    BOUND_S: ClassVar[float]  # more than all that is planned, and all that is waited for

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.now, self.order, self.queue = 0.0, 0, list[tuple[float, int, Callable[[], None]]]()
        self.last_at: dict[Hashable, float] = {}  # by way: when the newest message arrives
        self.end = ""  # the run's, as soon as it is decided

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.seed})"

    def befall(self, numbers: Sequence[int], within_s: float, whats: Sequence[str]) -> None:
        """Some of these methods are called, as many as one of `numbers`."""
        for _ in range(self.random.choice(numbers)):
            self.after(self.random.uniform(0, within_s), getattr(self, self.random.choice(whats)))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + seconds, self.order, action))

    def late(self) -> float:
        return self.random.choice(LATE_S) * self.random.random()

    def send(self, way: Hashable, deliver: Callable[[], None]) -> None:
        """It arrives late, and after what was sent on this way before."""
        at = self.last_at[way] = max(self.now + self.late(), self.last_at.get(way, 0.0))
        self.after(at - self.now, deliver)

    def run(self) -> None:
        while self.queue and not self.end:
            self.now, _, action = heapq.heappop(self.queue)
            expect(self.now <= self.BOUND_S, f"no end by {self.now:.0f} s: {self.state()}")
            action()
        self.check_end()

    def state(self) -> object:
        """What an endless run is doing."""
        raise NotImplementedError

    def check_end(self) -> None:
        raise NotImplementedError
