"""The driver's knowledge of its workers, as a pure state machine: no clock, no process, no socket.

What happened goes in with the time at which it happened; `verdict(now)` says what it means: go on, finished, failed,
or hung. `driver.py` acts on it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

WAITING = frozenset({"exchange", "wait"})
"""Phases in which a worker waits for its peers: it is no culprit of a hang."""
COMPILING = "compile"
"""A compiler is at work: counts as progress as long as heartbeats come."""
USER = "user"
"""The user's own code, which reports nothing: it may take as long as it likes, unless a peer waits for it."""
START_S = 120.0
"""At least so long may the fork server take to load torch, on however slow a disk, whatever `timeout_s` is."""
ROOT_CAUSE_WAIT_S = 0.5
"""After `PeerLost` from one worker, how long to wait for the death or the error that caused it."""


@dataclass
class Seat:
    """What is known of one worker."""

    rank: int
    progress_at: float  # the driver's clock, when (phase, step) last changed
    heard_at: float  # when the last heartbeat came
    phase: str = "start"
    step: int = 0
    started: bool = False
    done: bool = False

    def idle_s(self, now: float) -> float:
        return max(0.0, now - self.progress_at)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed. `error` is the class of the worker's exception, "" for a death; `family` the class to raise here."""

    rank: int
    phase: str
    step: int
    message: str
    detail: str = ""
    error: str = ""
    family: str = ""
    exit_code: int = 1  # of a `sys.exit`
    secondary: bool = False  # another worker's end caused it


@dataclass(frozen=True)
class Finished:
    """Every worker has returned."""


@dataclass(frozen=True)
class Failed:
    failure: Failure


@dataclass(frozen=True)
class Hung:
    culprit: int
    seconds: float


class Coordinator:
    """Membership, last heartbeats and deadlines of one run. Times are seconds of one clock of the caller's choice."""

    def __init__(self, size: int, timeout_s: float, now: float) -> None:
        self.seats = [Seat(rank, now, now) for rank in range(size)]
        self.timeout_s = timeout_s
        self.generation = 0
        self._failures: list[tuple[float, Failure]] = []

    def started(self, rank: int, now: float) -> None:
        """A worker's process is there: its deadline begins."""
        seat = self.seats[rank]
        seat.started, seat.heard_at, seat.progress_at = True, now, now

    def beat(self, rank: int, phase: str, step: int, idle_s: float, now: float) -> None:
        """A heartbeat: where the worker is, and for how many seconds already."""
        seat = self.seats[rank]
        seat.phase, seat.step, seat.heard_at, seat.progress_at = phase, step, now, now - idle_s

    def returned(self, rank: int) -> None:
        self.seats[rank].done = True

    def raised(self, failure: Failure, now: float) -> None:
        """A worker reported its own error: it will exit, and that exit is no news."""
        self.seats[failure.rank].done = True
        self._failures.append((now, failure))

    def exited(self, rank: int, status: int, host: str, now: float, last: tuple[str, int] | None = None) -> None:
        """A worker's process ended, with `os.waitstatus_to_exitcode`'s status; a death unless it returned or raised.

        last: the phase and step that it left behind, newer than its last heartbeat.
        """
        seat = self.seats[rank]
        if last is not None:
            seat.phase, seat.step = last
        if not seat.done:
            where = f"in phase {seat.phase} at step {seat.step}"
            message = f"worker {rank} on {host} {how_it_ended(status)} {where}"
            self.raised(Failure(rank=rank, phase=seat.phase, step=seat.step, message=message), now)

    def excuse(self, seconds: float) -> None:
        """The driver itself was busy for so long and heard nobody: nobody's deadline runs meanwhile."""
        for seat in self.seats:
            seat.progress_at += seconds
            seat.heard_at += seconds

    def verdict(self, now: float) -> Finished | Failed | Hung | None:
        """What to do now; None: go on."""
        if self._failures:
            return self._failed(now)
        if all(seat.done for seat in self.seats):
            return Finished()
        return self._hung(now)

    def _failed(self, now: float) -> Failed | None:
        for _, failure in self._failures:
            if not failure.secondary:
                return Failed(failure)
        at, first = self._failures[0]
        waited = now - at >= ROOT_CAUSE_WAIT_S or all(seat.done for seat in self.seats)
        return Failed(first) if waited else None

    def _hung(self, now: float) -> Hung | None:
        running = [seat for seat in self.seats if not seat.done]
        compiling = [seat for seat in running if self._compiling(seat, now)]
        stale = [seat for seat in running if self._stale(seat, now) and seat not in compiling]
        busy = [seat for seat in stale if seat.phase not in WAITING]
        if not stale or (compiling and not busy):  # whoever waits for a compiler waits for progress
            return None
        suspects = busy or [seat for seat in running if seat.phase not in WAITING] or stale
        culprit = max(suspects, key=lambda seat: seat.idle_s(now))
        return Hung(culprit.rank, culprit.idle_s(now))

    def _stale(self, seat: Seat, now: float) -> bool:
        timeout_s = self.timeout_s if seat.started else max(self.timeout_s, START_S)
        return seat.phase != USER and seat.idle_s(now) >= timeout_s

    def _compiling(self, seat: Seat, now: float) -> bool:
        return seat.phase == COMPILING and now - seat.heard_at < self.timeout_s

    def table(self, now: float) -> str:
        """rank | last step | phase | seconds since progress"""
        rows = [("rank", "last step", "phase", "seconds since progress")]
        for seat in self.seats:
            idle = "" if seat.done else f"{seat.idle_s(now):.1f}"
            rows.append((str(seat.rank), str(seat.step), "returned" if seat.done else seat.phase, idle))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def how_it_ended(status: int) -> str:
    """An exit status in words: "was killed by signal 9 (SIGKILL; …)"."""
    if status >= 0:
        return f"ended its process with exit code {status} before it returned (os._exit?)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unnamed"
    hint = "; if nobody killed it, the machine may be out of memory" if name == "SIGKILL" else ""
    return f"was killed by signal {-status} ({name}{hint})"
