"""The driver's knowledge of its workers and server shards, as a pure state machine: no clock, no process, no socket.

What happened goes in with its time; `verdict(now)`, on which driver.py acts, is go on, finished, failed, or hung.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands import units
from manyhands.engines.driver.host_processes import name_of, process_indices_of

WAITING = frozenset({"exchange", "complete", "commit", "wait"})
"""Phases in which a worker waits for its peers, or a shard for its workers: it is no culprit of a hang."""
STEPPING = frozenset({"compute", "exchange", "complete", "commit"})
"""Phases of a worker whose step is the number of the steps that it has made."""
COMPILING = "compile"
"""A compiler is at work: counts as progress as long as heartbeats come."""
USER = "user"
"""The user's own code, which reports nothing: it may take as long as it likes, unless a peer waits for it."""
START_S = 120.0
"""At least so long may the fork server take to load torch, on however slow a disk, whatever `timeout_s` is."""
SILENT_S = 5.0
"""A process without a heartbeat (one every 0.25 s) for so long, or for `timeout_s` / 4 where that is less, is silent."""
ROOT_CAUSE_WAIT_S = 0.5
"""After `PeerLost` from one worker, how long to wait for the death or the error that caused it."""
LAST_WORDS_S = 1.0
"""How long to wait for the other processes after the last worker returned that the run waits for."""


@dataclass
class ProcessStatus:
    """What is known of one worker, or of a shard of the server (see host_processes.py)."""

    number: int
    progress_at: float  # the driver's clock, when (phase, step) last changed
    last_beat_at: float  # when the last heartbeat came
    phase: str = "start"
    step: int = 0
    started: bool = False
    done: bool = False

    def idle_s(self, now: float) -> float:
        return max(0.0, now - self.progress_at)

    def unheard_s(self, now: float) -> float:
        return max(0.0, now - self.last_beat_at)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed. error: the class of the worker's exception, "" for a death. family: the class raised here."""

    rank: int  # its process index, see host_processes.py
    phase: str
    step: int
    message: str
    detail: str = ""
    error: str = ""
    family: str = ""
    exit_code: int = 1  # of a `sys.exit`
    secondary: bool = False  # another worker's end caused it
    lost: int | None = None  # that worker, as far as it is known


@dataclass(frozen=True)
class ProcessFinished:
    """Every worker that must has returned, and all others and the shards with them, or they had their time."""


@dataclass(frozen=True)
class Failed:
    failure: Failure


@dataclass(frozen=True)
class Hung:
    """`seconds` without progress; `silent_s` of them without a heartbeat, 0 where heartbeats come."""

    culprit: int
    seconds: float
    silent_s: float = 0.0


class RunMonitor:
    """Membership, last heartbeats and deadlines of one run. Times are seconds of one clock of the caller's choice.

    awaited: the ranks whose return ends the run; None: all. names: how messages call a process.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        now: float,
        servers: int = 0,
        awaited: Collection[int] | None = None,
        names: Callable[[int], str] = name_of,
    ) -> None:
        self._awaited = frozenset(range(workers) if awaited is None else awaited)
        self._returned: set[int] = set()
        self._name_of = names
        self.processes = {
            process_index: ProcessStatus(process_index, now, now)
            for process_index in process_indices_of(workers, servers)
        }
        self.timeout_s = timeout_s
        self.generation = 0
        self._returned_at = now  # the last worker that did
        self._failures: list[tuple[float, Failure]] = []

    def added(self, process_index: int, now: float) -> None:
        """Another process of this index is about to start."""
        self.processes[process_index] = ProcessStatus(process_index, now, now)
        self._returned.discard(process_index)

    def left(self, process_index: int) -> None:
        """The run goes on without it."""
        self.processes[process_index].done = True

    def started(self, process_index: int, now: float) -> None:
        """Its process is there: its deadline begins."""
        known = self.processes[process_index]
        known.started, known.last_beat_at, known.progress_at = True, now, now

    def beat(self, process_index: int, phase: str, step: int, idle_s: float, now: float) -> None:
        """A heartbeat: the phase, and the seconds without progress. A waiting shard has nothing to do."""
        known = self.processes[process_index]
        since = 0.0 if process_index < 0 and phase in WAITING else idle_s
        known.phase, known.step, known.last_beat_at, known.progress_at = phase, step, now, now - since

    def found(self, process_index: int, phase: str, step: int) -> None:
        """Where it is by its status page, which is newer than the last heartbeat of a process that was stopped."""
        known = self.processes[process_index]
        known.phase, known.step = phase, step

    def returned(self, process_index: int, now: float) -> None:
        self.processes[process_index].done = True
        self._returned.add(process_index)
        self._returned_at = max(self._returned_at, now) if process_index >= 0 else self._returned_at

    def raised(self, failure: Failure, now: float) -> None:
        """A process reported its own error; its exit then adds nothing. Errors after its return are ignored."""
        if self.processes[failure.rank].done:
            return
        self.processes[failure.rank].done = True
        self._failures.append((now, failure))

    def exited(
        self,
        process_index: int,
        status: int,
        host: str,
        now: float,
        last: tuple[str, int] | None = None,
        detail: str = "",
    ) -> None:
        """A process ended, with `os.waitstatus_to_exitcode`'s status; a death unless it returned or raised.

        last: the phase and step that it left behind, newer than its last heartbeat; detail: the stack, if it left one.
        """
        known = self.processes[process_index]
        if last is not None:
            known.phase, known.step = last
        message = f"{self._name_of(process_index)} on {host} {how_it_ended(status)} in phase {known.phase} at step {known.step}"
        failure = Failure(rank=process_index, phase=known.phase, step=known.step, message=message, detail=detail)
        self.raised(failure, now)

    def excuse(self, seconds: float) -> None:
        """The driver itself was busy for so long and read no message: no deadline runs meanwhile."""
        for process in self.processes.values():
            process.progress_at += seconds
            process.last_beat_at += seconds

    def verdict(self, now: float) -> ProcessFinished | Failed | Hung | None:
        """What to do now; None: go on."""
        over = self._awaited <= self._returned
        if over:  # what befalls a worker that nobody waits for is no news any more
            self._failures = [(at, failure) for at, failure in self._failures if failure.rank < 0]
        if self._failures:
            return self._failed(now)
        if over:
            all_done = all(process.done for process in self.processes.values())
            return ProcessFinished() if all_done or now - self._returned_at >= LAST_WORDS_S else None
        return self._hung(now)

    def _failed(self, now: float) -> Failed | None:
        for at, failure in self._failures:
            if not failure.secondary:
                # one that nobody waits for may have failed because those have just returned for whom all wait
                counts = failure.rank < 0 or failure.rank in self._awaited or now - at >= ROOT_CAUSE_WAIT_S
                return Failed(failure) if counts else None
        at, first = self._failures[0]
        waited = now - at >= ROOT_CAUSE_WAIT_S or all(process.done for process in self.processes.values())
        return Failed(self._left_alone(first)) if waited else None

    def _left_alone(self, failure: Failure) -> Failure:
        """The same; where a worker waits for one that has returned, their programs made unequal steps."""
        if failure.lost not in self._returned:
            return failure
        ended = self.processes[failure.lost]
        message = (
            f"{self._name_of(failure.lost)}'s program ended after {units.count(ended.step, 'step')}, and {self._name_of(failure.rank)} waits for it in its "
            f"step {failure.step + 1}: all workers must make equally many steps (backward() and step() equally often, on all of them)"
        )
        return replace(failure, message=message)

    def _hung(self, now: float) -> Hung | None:
        """Blame the process without heartbeats for longest: all others may wait for it, whatever their phase is.

        Where all send heartbeats, blame the one without progress for longest, those that wait for peers last.
        """
        running = [process for process in self.processes.values() if not process.done]
        beating = [process for process in running if now - process.last_beat_at < self.timeout_s]
        compiling = [process for process in beating if process.phase == COMPILING]
        stale = [process for process in running if self._stale(process, now) and process not in compiling]
        busy = _at_work(stale)
        if not stale or (compiling and not busy):  # whoever waits for a compiler waits for progress
            return None
        at_work = [process for process in _at_work(running) if process.phase != USER]
        if not busy and any(not self._stale(process, now) for process in at_work):  # somebody is slow, and on the way
            return None
        silent = [process for process in running if self.is_silent(process.unheard_s(now)) and process.started]
        suspects = next(filter(None, (_at_work(silent), silent, busy, _at_work(running), stale)))
        culprit = max(suspects, key=lambda one: (one.unheard_s(now) if silent else 0.0, one.idle_s(now)))
        return Hung(culprit.number, culprit.idle_s(now), culprit.unheard_s(now) if silent else 0.0)

    def is_silent(self, seconds: float) -> bool:
        """Whether so many seconds without a sign of life are a silence."""
        return seconds >= min(SILENT_S, self.timeout_s / 4)

    def _stale(self, process: ProcessStatus, now: float) -> bool:
        timeout_s = self.timeout_s if process.started else max(self.timeout_s, START_S)
        return process.phase != USER and process.idle_s(now) >= timeout_s

    def table(self, now: float) -> str:
        """rank | last step | phase | seconds since progress | since a heartbeat"""
        rows = [("rank", "last step", "phase", "seconds since progress", "since a heartbeat")]
        for process in self.processes.values():
            idle = "" if process.done else f"{process.idle_s(now):.1f}"
            unheard = "" if process.done else f"{process.unheard_s(now):.1f}"
            name = str(process.number) if process.number >= 0 else self._name_of(process.number)
            rows.append((name, str(process.step), "returned" if process.done else process.phase, idle, unheard))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _at_work(processes: list[ProcessStatus]) -> list[ProcessStatus]:
    """Those of them that do not wait for others, as far as their phase shows."""
    return [process for process in processes if process.phase not in WAITING]


def how_it_ended(status: int) -> str:
    """An exit status in words: "was killed by signal 9 (SIGKILL; …)"."""
    if status >= 0:
        return f"ended with exit code {status} before it returned (did it call os._exit?)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unnamed"
    hint = "; if nobody killed it, the machine may be out of memory" if name == "SIGKILL" else ""
    return f"was killed by signal {-status} ({name}{hint})"


def line_of(traceback: str) -> str:
    """`train.py:31`: where an exception was raised, by the text of its traceback; "" where it does not say."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', traceback)
    return f"{Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""
