"""Virtual time: programs that take turns, each running until it waits, and one heap of what happens next.

A program's own computation takes no virtual time; time passes where a program sleeps or waits. What is due at the same
time happens in an order that the seed draws, so that the same programs with the same seed do the same.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from greenlet import getcurrent, greenlet

from manyhands.engines.sim.isolation import Isolated, capture, copied, restore
from manyhands.errors import ManyhandsError

T = TypeVar("T")


class Deadlock(ManyhandsError):
    """Every program waits, and nothing is due that could wake one of them."""


class Killed(BaseException):
    """Raised inside a program that is killed: it ends there, and is not an error of the program's."""


@dataclass(slots=True, eq=False)
class Future(Generic[T]):
    """A value to come. One program may wait for it; whoever has the value sets it, once."""

    timeline: Timeline
    is_set: bool = False
    value: T | None = None
    error: BaseException | None = None
    _program: SimProgram | None = None  # that waits for it

    def set(self, value: T) -> None:
        """The value is here: who waits goes on, at this time. Later ones are ignored."""
        if not self.is_set:
            self.is_set, self.value = True, value
            self._wake()

    def fail(self, error: BaseException) -> None:
        """As `set`, but who waits gets this error raised."""
        if not self.is_set:
            self.is_set, self.error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._program is not None:
            self.timeline.at(self.timeline.now, self._program.resume)


@dataclass(slots=True, eq=False)
class Due:
    """Something that will happen; `cancel` it and it will not."""

    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Idempotent."""
        self.action = None


class SimProgram:
    """One that takes turns; made by `Timeline.start`."""

    def __init__(self, timeline: Timeline, name: int, function: Callable[[], Any]) -> None:
        self.timeline, self.name = timeline, name
        self.paused_until = 0.0  # while it is paused it does not go on, whatever wakes it
        self.paused_s = 0.0  # so far, and as it is planned
        self.ended = False
        self.killed = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.waits_for = ""  # for messages
        self.isolated: Isolated | None = None  # None: as it was outside, or its state is the process's now
        self._greenlet = greenlet(self._run)
        self._function: Callable[[], Any] | None = function

    def resume(self) -> None:
        """Let it run until it waits again; from the timeline alone."""
        if self.ended:
            return
        if self.paused_until > self.timeline.now:
            self.timeline.at(self.paused_until, self.resume)
            return
        self.timeline.give_turn(self)

    def pause(self, seconds: float) -> None:
        """It does nothing for so long from now on."""
        now = self.timeline.now
        until = max(self.paused_until, now + seconds)
        self.paused_s += until - max(self.paused_until, now)
        self.paused_until = until

    def kill(self) -> None:
        """End it where it is; idempotent. Its `finally` blocks run, and may not wait."""
        if not self.ended and not self.killed:
            self.killed = True
            self.timeline.at(self.timeline.now, self.throw)

    def throw(self) -> None:
        """Raise Killed in it, now; from the timeline alone."""
        if not self.ended:
            self.killed = True
            self.timeline.give_turn(self, Killed())

    def switch(self, error: BaseException | None) -> None:
        """Go on in it; returns when it waits or ends."""
        if error is None:
            self._greenlet.switch()
        elif self._greenlet:  # it has begun
            self._greenlet.throw(error)
        else:
            self._end()

    def _run(self) -> None:
        assert self._function is not None
        try:
            self.value = self._function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - kept, and raised by whoever runs the timeline
            self.error = error
        finally:
            self._end()

    def _end(self) -> None:
        self.ended, self._function, self.isolated = True, None, None
        self.timeline.left -= 1


class Timeline:
    """See the module's docstring. One timeline runs in one thread, once."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0  # seconds
        self.programs: list[SimProgram] = []
        self.left = 0  # programs that have not ended
        self.on_end: Callable[[SimProgram], None] = lambda program: None
        """Called when a program ended, by itself, by an error or killed; an error raised here ends the timeline."""
        self._heap: list[tuple[float, float, int, Due]] = []
        self._ties = random.Random(seed)
        self._count = 0
        self._resident: SimProgram | None = None  # whose state is the process's
        self._current: SimProgram | None = None  # whose turn it is
        self._outside = capture()

    def start(self, name: int, function: Callable[[], Any], at: float = 0.0) -> SimProgram:
        """A program that begins at a time; `name` is its rank."""
        program = SimProgram(self, name, function)
        self.programs.append(program)
        self.left += 1
        self.at(at, program.resume)
        return program

    def at(self, time: float, action: Callable[[], None]) -> Due:
        """Do this at a time that is not past. Actions run between the programs' turns, and may not wait."""
        assert time >= self.now, f"{time} is past, it is {self.now}"
        due = Due(action)
        self._count += 1
        heapq.heappush(self._heap, (time, self._ties.random(), self._count, due))
        return due

    def run(self) -> None:
        """Run all programs to their end. Raises Deadlock, and what `on_end` raises; other programs are then killed."""
        self._outside = capture()
        try:
            while self.left:
                if not self.advance():
                    waiting = [program for program in self.programs if not program.ended]
                    listing = "; ".join(f"{program.name} waits for {program.waits_for}" for program in waiting[:5])
                    more = " …" if len(waiting) > 5 else ""
                    raise Deadlock(f"the run is stuck at {self.now:g} s, because everybody waits: {listing}{more}")
        finally:
            self.on_end = lambda program: None
            try:
                for program in self.programs:
                    program.throw()
            finally:  # whatever interrupts that
                restore(self._outside)

    def advance(self) -> bool:
        """Let happen what is due next; whether anything was. What was cancelled takes no time."""
        while self._heap:
            time, _, _, due = heapq.heappop(self._heap)
            action, due.action = due.action, None
            if action is not None:
                self.now = time
                action()
                return True
        return False

    # -- for programs ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> SimProgram:
        """Whose turn it is; only a program may ask."""
        current = self._current
        assert current is not None, "no program is running"
        return current

    @property
    def is_dead(self) -> bool:
        """Whether the program that asks was killed: the dead say nothing. False outside of programs."""
        return self._current is not None and self._current.killed

    def sleep(self, seconds: float) -> None:
        """Let so much time pass for the program that calls; also of 0 seconds, others get their turn."""
        program = self.running
        self.at(self.now + seconds, program.resume)
        self._wait(program, "time")

    def work(self, seconds: float) -> None:
        """Let so much time pass in which the program that calls is not paused."""
        program = self.running
        left = seconds + max(0.0, program.paused_until - self.now)  # it may have been paused in this very turn
        while left > 0:
            paused, due = program.paused_s, self.now + left
            self.sleep(left)
            left = program.paused_s - paused - (self.now - due)

    def cell(self) -> Future[Any]:
        return Future(self)

    def wait(self, cell: Future[T], what: str = "something") -> T:
        """The cell's value, as soon as it is set; raises its error. `what` names it in messages."""
        cell._program = program = self.running
        while not cell.is_set:
            self._wait(program, what)
        cell._program = None
        if cell.error is not None:
            raise cell.error
        return cell.value  # type: ignore[return-value]

    def _wait(self, program: SimProgram, what: str) -> None:
        if program.killed:
            raise Killed
        program.waits_for = what
        hub = getcurrent().parent
        assert hub is not None
        hub.switch()

    # -- turns -------------------------------------------------------------------------------------------------------

    def give_turn(self, program: SimProgram, error: BaseException | None = None) -> None:
        """Let a program run until it waits; the process's state is the program's own meanwhile."""
        if self._resident is not program:
            if self._resident is not None and not self._resident.ended:
                self._resident.isolated = capture()
            restore(program.isolated or copied(self._outside))
            self._resident, program.isolated = program, None
        before, self._current = self._current, program
        try:
            program.switch(error)
        finally:
            self._current = before
        if program.ended:
            self.on_end(program)
