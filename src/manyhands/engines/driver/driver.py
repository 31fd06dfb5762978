"""One run, seen from the driver: hears the crews of all hosts, lets the monitor judge, and acts on the verdict."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from manyhands import errors
from manyhands.data import leases
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.engines.base import LaunchSpec
from manyhands.engines.descriptors import room_for_descriptors
from manyhands.engines.driver.host_processes import HostProcesses, seats_of
from manyhands.engines.driver.rendezvous import Rendezvous
from manyhands.engines.driver.run_monitor import Failed, Failure, Hung, ProcessFinished, ProcessStatus, RunMonitor
from manyhands.engines.local.fork_client import import_path
from manyhands.engines.local.serialization import serialize
from manyhands.errors import ManyhandsError, WorkerFailed
from manyhands.events import Event
from manyhands.signals import PREEMPTED
from manyhands.transport.frame import FrameError

T = TypeVar("T")

_POLL_S = 0.1
_EXIT_GRACE_S = 0.5  # between a worker's last message and its exit


@dataclass
class Driver:
    """Runs one program; afterwards no process and no descriptor of the run is left, however it ended."""

    crews: Sequence[HostProcesses]
    spec: LaunchSpec
    clock: Callable[[], float] = time.monotonic
    _values: dict[int, Any] = field(default_factory=dict, init=False)
    _news: deque[Event] = field(default_factory=deque, init=False)  # what the observer has not heard yet
    _leases: Leases = field(default_factory=Leases, init=False)
    _meetings: Rendezvous = field(default_factory=Rendezvous, init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.monitor = RunMonitor(
            spec.workers, spec.timeout_s, self.clock(), spec.shards, awaited=spec.awaited, names=spec.name_of
        )
        self._crew_of = {seat: crew for crew in self.crews for seat in crew.seats}

    def run(self, program: Any) -> list[Any]:
        with room_for_descriptors(3 * len(self._crew_of) + 2 * len(self.crews)):
            try:
                self._busy(partial(self._start, program))
                self._listen()
                self._end(_EXIT_GRACE_S)
            except BaseException:
                self._end(grace_s=0.0)
                raise
        return [self._values.get(rank) for rank in range(self.spec.workers)]

    def _start(self, program: Any) -> None:
        fd = serialize(program, "the program")
        try:
            for crew in self.crews:
                crew.start(self._shared(), fd)
        finally:
            os.close(fd)

    def _shared(self) -> dict[str, Any]:
        """What every process of the run is to know; a crew may say it in its host's own way."""
        return {
            "size": self.spec.workers,
            "path": import_path(),
            "argv": sys.argv,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "threads": self.spec.threads_per_worker,
            "device": self.spec.device,
            "timeout_s": self.spec.timeout_s,
            "server": None if self.spec.server is None else vars(self.spec.server),
            "servers": self.spec.shards,
        }

    def _end(self, grace_s: float) -> None:
        """All crews, also where one of them fails to; the first error is raised then."""
        failed: BaseException | None = None
        for crew in self.crews:
            try:
                crew.end(grace_s)
            except BaseException as error:  # noqa: BLE001 - a Ctrl-C included: the other hosts' processes must end first
                failed = failed or error
        if failed is not None:
            raise failed

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        stopped = False
        with selectors.DefaultSelector() as selector:
            for crew in self.crews:
                for fd in crew.filenos():
                    selector.register(fd, selectors.EVENT_READ, crew)
            while not self._finished():
                for crew in dict.fromkeys(key.data for key, _ in selector.select(_POLL_S)):
                    self._hear(crew)
                self._tell_observer()
                stopped = stopped or self._stop()

    def _finished(self) -> bool:
        """Whether all have returned; raises what a failure or a hang calls for."""
        verdict = self.monitor.verdict(self.clock())
        if isinstance(verdict, Failed):
            raise self._error(verdict.failure)
        if isinstance(verdict, Hung):
            raise self._hung(verdict)
        return isinstance(verdict, ProcessFinished)

    def _hear(self, crew: HostProcesses) -> None:
        for seat, body in crew.receive():
            self._take(crew, seat, body)

    def _take(self, crew: HostProcesses, seat: int, body: dict[str, Any]) -> None:
        now = self.clock()
        match body["type"]:
            case "beat":
                self.monitor.beat(seat, body["phase"], body["step"], body["idle_s"], now)
                self._news.extend(Event(**event) for event in body["events"])
            case "lease":
                self._lease(seat, Segment(**body["segment"]))
            case "ask":
                self._tell_observer()  # all that was emitted before the question
                value = self._observed(self.spec.observer.answer, Event(**body["event"]))
                crew.tell(seat, {"type": "answer", "value": value})
            case "meet":
                self._meet(seat, body)
            case "value":
                self._values[seat] = body.get("value")
                self.monitor.returned(seat, now)
            case "started":
                self.monitor.started(seat, now)
            case "exited":
                last = None if body["phase"] is None else (body["phase"], body["step"])
                self.monitor.exited(seat, body["status"], crew.host, now, last, body["detail"])
            case "error":
                self._raised(crew, seat, body)
            case "lost":
                self._lost(crew, seat, body)
            case other:
                raise ManyhandsError(
                    f"{self.spec.name_of(seat)} on {crew.host} sent a message of unknown type {other!r}"
                )

    def _tell_observer(self) -> None:
        """What was emitted, in order. It may write files: leases do not wait for that."""
        while self._news:
            self._observed(self.spec.observer.event, self._news.popleft())

    def _observed(self, hear: Callable[[Event], T], event: Event) -> T:
        """What the observer says to an event; WorkerFailed, naming the worker and its host, where the event is none."""
        try:
            return self._busy(partial(hear, event))
        except FrameError as error:
            seat = -1 if event.rank is None else event.rank
            crew = self._crew_of.get(seat, self.crews[0])
            where = f"{self.spec.name_of(seat)} on {crew.host}"
            raise WorkerFailed(
                f"{where} sent an event that makes no sense: {error}. Does it run the same version of manyhands?",
                rank=seat,
                host=crew.host,
                phase="",
                step=event.step,
            ) from error

    def _busy(self, call: Callable[[], T]) -> T:
        """What takes the driver's own time, as the observer or a program of many bytes, is no silence of the workers'."""
        began = self.clock()
        value = call()
        self.monitor.excuse(self.clock() - began)
        return value

    # -- answering ---------------------------------------------------------------------------------------------------

    def _lease(self, seat: int, segment: Segment) -> None:
        try:
            answer = self._leases.take(seat, segment)
        except AssertionError as error:
            raise self._out_of_turn(seat, f"asked for rows out of turn ({error})") from error
        self._leased(seat, answer)
        self._release()

    def _out_of_turn(self, seat: int, what: str) -> WorkerFailed:
        known, host = self.monitor.seats[seat], self._crew_of[seat].host
        message = f"{self.spec.name_of(seat)} on {host} {what}: do all hosts run the same version of manyhands?"
        return WorkerFailed(message, rank=seat, host=host, phase=known.phase, step=known.step)

    def _release(self) -> None:
        """The answers to those who waited."""
        released, self._leases.released = self._leases.released, []
        for seat, answer in released:
            self._leased(seat, answer)

    def _leased(self, seat: int, answer: Lease | End | None) -> None:
        value = None if answer is None else leases.to_json(answer)
        self._crew_of[seat].tell(seat, {"type": "leased", "value": value})

    def _meet(self, seat: int, body: dict[str, Any]) -> None:
        if seat not in body["seats"] or not self._crew_of.keys() >= set(body["seats"]):
            raise self._out_of_turn(seat, f"came to a meeting of seats {body['seats']}, which are not this run's")
        values = self._meetings.come(seat, body["name"], body["seats"], body["value"])
        for other in body["seats"] if values is not None else ():
            self._crew_of[other].tell(other, {"type": "met", "name": body["name"], "values": values})

    def _stop(self) -> bool:
        reason = self._busy(self.spec.observer.stopping)
        if reason:
            self._leases.stop(reason)
            self._release()
            for rank in range(self.spec.workers):
                self._crew_of[rank].tell(rank, {"type": "stop", "reason": reason})
        if reason == PREEMPTED:
            # A script's own handler may have something to save; the loop of train() ignores the signal.
            for crew in self.crews:
                crew.signal(signal.SIGTERM)
        return bool(reason)

    # -- judging -----------------------------------------------------------------------------------------------------

    def _raised(self, crew: HostProcesses, seat: int, body: dict[str, Any]) -> None:
        fields = {name: value for name, value in body.items() if name != "type"}
        if not body["family"]:
            place = f"{self.spec.name_of(seat)} on {crew.host} failed in phase {body['phase']} at step {body['step']}"
            fields["message"] = f"{place}: {body['error']}: {body['message']}"
        self.monitor.raised(Failure(**fields), self.clock())

    def _lost(self, crew: HostProcesses, seat: int, body: dict[str, Any]) -> None:
        phase, step = body["phase"], body["step"]
        place = f"{self.spec.name_of(seat)} on {crew.host} is lost in phase {phase} at step {step}"
        failure = Failure(rank=seat, phase=phase, step=step, message=f"{place}: {body['why']}")
        self.monitor.raised(failure, self.clock())

    def _error(self, failure: Failure) -> Exception:
        """What to raise: manyhands' own errors as they were, anything else as `WorkerFailed`."""
        family = getattr(errors, failure.family, None)
        if not (isinstance(family, type) and issubclass(family, ManyhandsError)):  # a name of something else there
            family = ManyhandsError
        if failure.family and family not in (errors.PeerLost, WorkerFailed):
            error: ManyhandsError = family(failure.message)
            where = f"{self.spec.name_of(failure.rank)} on {self._crew_of[failure.rank].host}"
            error.add_note(f"raised by {where}:\n{failure.detail}")
            return error
        return self._failed(failure)

    def _failed(self, failure: Failure) -> WorkerFailed:
        error = WorkerFailed(
            failure.message,
            rank=failure.rank,
            host=self._crew_of[failure.rank].host,
            phase=failure.phase,
            step=failure.step,
            detail=failure.detail,
            error=failure.error,
        )
        error.exit_code = failure.exit_code
        return error

    def _hung(self, verdict: Hung) -> WorkerFailed:
        """The error of a hang, judged once more by what the status pages say, as of the moment when it was seen."""
        now = self.clock()
        stacks = self._stacks()
        for crew in self.crews:
            for number, place in crew.where().items():
                self.monitor.found(number, *place)
        again = self.monitor.verdict(now)
        verdict = again if isinstance(again, Hung) else verdict
        seat, crew = self.monitor.seats[verdict.culprit], self._crew_of[verdict.culprit]
        message = f"{self._how_it_hangs(verdict, crew, seat)} (timeout_s={self.spec.timeout_s:g}). Where every worker is follows"
        if not verdict.silent_s:
            message += "; if the work is only slow, give a longer timeout_s"
        detail = f"{self.monitor.table(now)}\n\n{stacks}"
        failure = Failure(rank=seat.number, phase=seat.phase, step=seat.step, message=f"{message}.", detail=detail)
        return self._failed(failure)

    def _how_it_hangs(self, verdict: Hung, crew: HostProcesses, seat: ProcessStatus) -> str:
        name, place = f"{self.spec.name_of(seat.number)} on {crew.host}", f"in phase {seat.phase} at step {seat.step}"
        if not verdict.silent_s:
            return f"{name} made no progress for {verdict.seconds:.1f} s, {place}"
        if self.monitor.is_silent(silent_s := crew.silent_s()):
            return (
                f"host {crew.host} is silent: nothing came from it for {silent_s:.1f} s, and {name} was last heard {place}. "
                "Look whether that machine is up, and whether the network between is"
            )
        return (
            f"{name} is silent: it sent no heartbeat for {verdict.silent_s:.1f} s, {place}. Its process was stopped, or native "
            "code there holds Python's lock"
        )

    def _stacks(self) -> str:
        """Of all seats; a host that is silent is not asked."""
        asked = [crew for crew in self.crews if not self.monitor.is_silent(crew.silent_s())]
        stacks = {seat: stack for crew in asked for seat, stack in crew.stacks().items()}
        missing = "(no stack: the process does not answer, or has ended)"
        seats = seats_of(self.spec.workers, self.spec.shards)
        return "\n\n".join(f"{self.spec.name_of(seat)}:\n{stacks.get(seat) or missing}" for seat in seats)
