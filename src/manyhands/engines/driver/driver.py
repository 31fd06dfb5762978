"""One run on the driver: receives messages from all hosts, gives them to the RunMonitor and acts on its verdict."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from manyhands import errors
from manyhands.data import leases
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.data.row_pieces import RowPiece
from manyhands.engines.base import LaunchSpec
from manyhands.engines.descriptors import room_for_descriptors
from manyhands.engines.driver.host_processes import HostProcesses, process_indices_of
from manyhands.engines.driver.run_monitor import Failed, Failure, Hung, ProcessFinished, ProcessStatus, RunMonitor
from manyhands.engines.faults import ORDERLY, Fault
from manyhands.engines.local.fork_client import import_path
from manyhands.engines.local.serialization import serialize
from manyhands.errors import ManyhandsError, WorkerFailed
from manyhands.events import Event
from manyhands.signals import PREEMPTED
from manyhands.transport.frame import FrameError

S = TypeVar("S")
T = TypeVar("T")

OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")
_POLL_S = 0.1
_EXIT_GRACE_S = 0.5  # between a worker's last message and its exit


class Rendezvous:
    """Processes exchange values through the driver before they can reach each other. Names can be reused."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, tuple[int, ...]], dict[int, Any]] = {}

    def arrive(self, process_index: int, name: str, process_indices: list[int], value: Any) -> list[Any] | None:
        """All values in the order of `process_indices` if this process is the last to arrive, else None."""
        meeting = name, tuple(process_indices)  # others may meet by this name at the same time
        values = self._open.setdefault(meeting, {})
        values[process_index] = value
        if any(other not in values for other in process_indices):
            return None
        del self._open[meeting]
        return [values[other] for other in process_indices]

    def drop(self) -> list[int]:
        """End all that are open: whoever waits in one, in vain."""
        waiting = [process_index for values in self._open.values() for process_index in values]
        self._open.clear()
        return waiting


@dataclass
class Driver:
    """Runs one program; afterwards no process and no descriptor of the run is left, however it ended."""

    hosts: list[HostProcesses]
    spec: LaunchSpec
    clock: Callable[[], float] = time.monotonic
    faults: Sequence[Fault] = ()
    _values: dict[int, Any] = field(default_factory=dict, init=False)
    _news: deque[Event] = field(default_factory=deque, init=False)  # what the observer has not received yet
    _leases: Leases = field(default_factory=Leases, init=False)
    _process_of: dict[int, int] = field(default_factory=dict, init=False)  # replica -> the process that asks for it
    _rendezvous: Rendezvous = field(default_factory=Rendezvous, init=False)
    _began: float = field(default=0.0, init=False)
    _paused: dict[int, float] = field(default_factory=dict, init=False)  # process -> until when
    _selector: selectors.BaseSelector = field(init=False, repr=False)
    _delivered: dict[int, RowPiece] = field(default_factory=dict, init=False)  # what is not answered yet, by process
    _of_lost_hosts: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.monitor = RunMonitor(
            spec.workers, spec.timeout_s, self.clock(), spec.shard_processes, awaited=spec.awaited, names=spec.name_of
        )
        self._planned = {str(fault): fault for fault in self.faults}  # what has not happened yet
        self._host_of = {number: host for host in self.hosts for number in host.process_indices}

    def run(self, program: Any) -> list[Any]:
        with room_for_descriptors(3 * len(self._host_of) + 2 * len(self.hosts)):
            try:
                self._began = self.clock()
                self._busy(partial(self._start, program))
                self._listen()
                self._tell_unfired()
                self._end(_EXIT_GRACE_S)
            except BaseException:
                self._end(grace_s=0.0)
                raise
        return self._results()

    def _results(self) -> list[Any]:
        return [self._values.get(rank) for rank in range(self.spec.workers)]

    def _start(self, program: Any) -> None:
        shared = {  # what every process of the run is to know; a host may override it
            "size": self.spec.workers,
            "path": import_path(),
            "argv": sys.argv,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "threads": self.spec.threads_per_worker,
            "device": self.spec.device,
            "timeout_s": self.spec.timeout_s,
            "server": self._server_fields(),
            "servers": self.spec.shards,
        }
        if self.faults:
            shared["faults"] = self._faults_at_steps()
        if self.spec.survive is not None:
            shared["survive"] = self.spec.survive.max_workers or self.spec.workers
            shared["fixed_members"] = self.spec.fixed_members
            if self.spec.replica > 1:
                shared["replica"] = self.spec.replica
        fd = serialize(program, "the program")
        try:
            for host_processes in self.hosts:
                host_processes.start(shared, fd)
            self._keep_for_hosts_to_come(shared, fd)
        finally:
            os.close(fd)

    def _server_fields(self) -> dict[str, Any] | None:
        if self.spec.server is None:
            return None
        from manyhands.engines.own_rules import to_fields  # it loads torch

        return to_fields(self.spec.server)

    def _keep_for_hosts_to_come(self, shared: dict[str, Any], program: int) -> None:
        """With what they will be started."""

    def _end(self, grace_s: float) -> None:
        """End the processes of all hosts, also when one of them fails; then raise the first error."""
        failed: BaseException | None = None
        for host_processes in self.hosts:
            try:
                host_processes.end(grace_s)
            except BaseException as error:  # noqa: BLE001 - a Ctrl-C included: the other hosts' processes must end first
                failed = failed or error
        if failed is not None:
            raise failed

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        stopped = False
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            for host_processes in self.hosts:
                self._listen_to(host_processes)
            while not self._finished():
                for host_processes in dict.fromkeys(key.data for key, _ in selector.select(_POLL_S)):
                    self._hear(host_processes)
                self._inject_faults()
                self._tell_observer()
                stopped = stopped or self._stop()

    def _listen_to(self, host_processes: HostProcesses) -> None:
        for fd in host_processes.filenos():
            self._selector.register(fd, selectors.EVENT_READ, host_processes)

    def _finished(self) -> bool:
        """Whether all have returned; raises what a failure or a hang calls for."""
        verdict = self.monitor.verdict(self.clock())
        if isinstance(verdict, Failed):
            raise self._error(verdict.failure)
        if isinstance(verdict, Hung):
            self._judge_hang(verdict)
        return isinstance(verdict, ProcessFinished)

    def _judge_hang(self, verdict: Hung) -> None:
        raise self._hung(verdict)

    def _hear(self, host_processes: HostProcesses) -> None:
        for process_index, body in host_processes.receive():
            self._take(host_processes, process_index, body)

    def _take(self, host_processes: HostProcesses, process_index: int, body: dict[str, Any]) -> None:
        now = self.clock()
        match body["type"]:
            case "beat":
                self.monitor.beat(process_index, body["phase"], body["step"], body["idle_s"], now)
                self._news.extend(Event(**event) for event in body["events"])
                if self._planned:
                    for event in body["events"]:
                        if event["type"] == "fault":
                            self._fired(str(event.get("values", {}).get("fault")))
            case "lease" | "lease_of_push":
                self._lease(process_index, Segment(**body["segment"]), body["replica"], body.get("push"))
            case "rows":
                self._take_rows(process_index, RowPiece(rank=process_index, **_without_type(body)))
            case "ask":
                self._tell_observer()  # all that was emitted before the question
                value = self._observe(self.spec.observer.answer, Event(**body["event"]))
                host_processes.send(process_index, {"type": "answer", "value": value})
            case "arrive":
                self._arrived(process_index, body)
            case "value":
                self._values[process_index] = body.get("value")
                self.monitor.returned(process_index, now)
            case "started":
                self.monitor.started(process_index, now)
            case "exited":
                last = None if body["phase"] is None else (body["phase"], body["step"])
                self.monitor.exited(process_index, body["status"], host_processes.host, now, last, body["detail"])
            case "error":
                self.monitor.raised(self._error_of(process_index, body), now)
            case "lost":
                self._of_lost_hosts.add(process_index)
                self.monitor.raised(self._loss_of(process_index, body), now)
            case other:
                raise ManyhandsError(f"{self._who(process_index)} sent a message of unknown type {other!r}")

    def _error_of(self, process_index: int, body: dict[str, Any]) -> Failure:
        fields = _without_type(body)
        if not body["family"]:
            place = f"{self._who(process_index)} failed in phase {body['phase']} at step {body['step']}"
            fields["message"] = f"{place}: {body['error']}: {body['message']}"
        return Failure(**fields)

    def _loss_of(self, process_index: int, body: dict[str, Any]) -> Failure:
        phase, step = body["phase"], body["step"]
        message = f"the driver lost {self._who(process_index)} in phase {phase} at step {step}: {body['why']}"
        return Failure(rank=process_index, phase=phase, step=step, message=message)

    def _who(self, process_index: int) -> str:
        """`worker 1 on alpha`"""
        return f"{self.spec.name_of(process_index)} on {self._host(process_index)}"

    def _host(self, process_index: int) -> str:
        return self._host_of.get(process_index, self.hosts[0]).host

    def _tell_observer(self) -> None:
        """What was emitted, in order. It may write files: leases do not wait for that."""
        while self._news:
            self._observe(self.spec.observer.event, self._news.popleft())

    def _observe(self, deliver: Callable[[Event], T], event: Event) -> T:
        """The observer's result for an event."""
        return self._observed(deliver, event, rank=-1 if event.rank is None else event.rank, step=event.step)

    def _observed(self, deliver: Callable[[S], T], sent: S, *, rank: int, step: int) -> T:
        """The observer's result for what a worker sent; WorkerFailed, with the worker and its host, where it is malformed."""
        try:
            return self._busy(partial(deliver, sent))
        except FrameError as error:
            what = "an event" if isinstance(sent, Event) else "rows"
            message = (
                f"{self._who(rank)} sent {what} that cannot be read: {error}. Use the same version of manyhands on "
                "all hosts"
            )
            raise self._failed(Failure(rank=rank, phase="", step=step, message=message)) from error

    def _busy(self, call: Callable[[], T]) -> T:
        """Time that the driver itself takes, in an observer or for a large program, is no silence of the workers."""
        began = self.clock()
        value = call()
        self.monitor.excuse(self.clock() - began)
        return value

    # -- faults that the engine was given ----------------------------------------------------------------------------

    def _faults_at_steps(self) -> str:
        """Those that processes are to have by themselves, and nobody has had yet."""
        own = [text for text, fault in self._planned.items() if fault.step is not None and fault.what not in ORDERLY]
        return ",".join(own)

    def _fired(self, text: str) -> None:
        """A fault that was planned happened: to a process, by itself at its step, or from here at a time."""
        fault = self._planned.pop(text, None)
        if fault is not None and fault.what == "pause":
            self._paused[self._struck(fault)] = self.clock() + fault.seconds

    def _struck(self, fault: Fault) -> int:
        """The process that it befalls."""
        return fault.node

    def _inject_faults(self) -> None:
        """What is due at a time: signals, SIGCONT after a pause too, which is repeated until a heartbeat shows that it arrived."""
        now = self.clock()
        for text, fault in [*self._planned.items()]:
            struck = self._struck(fault)
            if fault.what in ORDERLY or struck not in self.monitor.processes:
                continue
            known = self.monitor.processes[struck]
            if fault.time is not None and now - self._began >= fault.time and known.started and not known.done:
                self._fired(text)
                self._news.append(
                    Event(type="fault", time_s=now - self._began, step=known.step, values={"fault": text})
                )
                self._signal(struck, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
        for process_index, until in [*self._paused.items()]:
            if self.monitor.processes[process_index].last_beat_at > until:
                del self._paused[process_index]
            elif now >= until:
                self._signal(process_index, signal.SIGCONT)

    def _signal(self, process_index: int, number: int) -> None:
        self._host_of[process_index].signal(number, [process_index])

    def _tell_unfired(self) -> None:
        for fault in self._planned.values():
            warning = Event(type="warning", rank=0, values={"message": fault.missed()})
            self._observe(self.spec.observer.event, warning)

    # -- answering ---------------------------------------------------------------------------------------------------

    def _lease(self, process_index: int, segment: Segment, replica: int, push: int | None) -> None:
        asker = replica if push is None else process_index  # ranks change where workers may be lost
        self._process_of[asker] = process_index
        try:
            if push is None:
                answer = self._leases.take(replica, segment)
            else:
                answer = self._leases.take(replica, segment, holder=process_index, push=push)
        except AssertionError as error:
            raise self._out_of_turn(process_index, f"asked for rows out of turn ({error})") from error
        self._leased(process_index, answer)
        self._release()

    def _out_of_turn(self, process_index: int, what: str) -> WorkerFailed:
        known = self.monitor.processes[process_index]
        message = f"{self._who(process_index)} {what}: use the same version of manyhands on all hosts"
        return self._failed(Failure(rank=process_index, phase=known.phase, step=known.step, message=message))

    def _release(self) -> None:
        """The answers to those who waited."""
        released, self._leases.released = self._leases.released, []
        for replica, answer in released:
            self._leased(self._process_of[replica], answer)

    def _leased(self, process_index: int, answer: Lease | End | None) -> None:
        value = None if answer is None else leases.to_json(answer)
        self._host_of[process_index].send(process_index, {"type": "leased", "value": value})

    def _take_rows(self, process_index: int, piece: RowPiece) -> None:
        """The worker goes on when it is answered: at once, or when rows that come before these have made room."""
        step = self.monitor.processes[process_index].step
        self._observed(self.spec.observer.take_rows, piece, rank=process_index, step=step)
        self._delivered[process_index] = replace(piece, data=b"")
        for other, theirs in [*self._delivered.items()]:
            if not self.spec.observer.must_wait(theirs):
                del self._delivered[other]
                self._host_of[other].send(other, {"type": "delivered", "value": True})
            elif other == process_index:
                self._host_of[other].send(other, {"type": "delivered", "value": None})

    def _arrived(self, process_index: int, body: dict[str, Any]) -> None:
        invited = body["process_indices"]
        if process_index not in invited or not self._host_of.keys() >= set(invited):
            what = f"arrived at a rendezvous of the processes {invited}, which are not this run's"
            raise self._out_of_turn(process_index, what)
        values = self._rendezvous.arrive(process_index, body["name"], invited, body["value"])
        for other in invited if values is not None else ():
            self._host_of[other].send(other, {"type": "complete", "name": body["name"], "values": values})

    def _stop(self) -> bool:
        reason = self._busy(self.spec.observer.stopping)
        if reason:
            self._leases.stop(reason)
            self._release()
            for process_index, host_processes in self._host_of.items():
                if process_index >= 0:
                    host_processes.send(process_index, {"type": "stop", "reason": reason})
        if reason == PREEMPTED:
            # A script's own handler may have something to save; the loop of train() ignores the signal.
            for host_processes in self.hosts:
                host_processes.signal(signal.SIGTERM)
        return bool(reason)

    # -- judging -----------------------------------------------------------------------------------------------------

    def _error(self, failure: Failure) -> Exception:
        """What to raise: manyhands' own errors as they were, anything else as `WorkerFailed`."""
        family = getattr(errors, failure.family, None)
        if not (isinstance(family, type) and issubclass(family, ManyhandsError)):  # a name of something else there
            family = ManyhandsError
        if failure.family and family not in (errors.PeerLost, WorkerFailed):
            error: ManyhandsError = family(failure.message)
            error.add_note(f"raised by {self._who(failure.rank)}:\n{failure.detail}")
            return error
        return self._failed(failure)

    def _failed(self, failure: Failure) -> WorkerFailed:
        error = WorkerFailed(
            failure.message,
            rank=failure.rank,
            host=self._host(failure.rank),
            phase=failure.phase,
            step=failure.step,
            detail=failure.detail,
            error=failure.error,
        )
        error.exit_code = failure.exit_code
        error.cause = "host" if failure.rank in self._of_lost_hosts else "error" if failure.error else "death"
        if failure.error in OUT_OF_MEMORY:
            error.cause = "memory"
        return error

    def _hung(self, verdict: Hung) -> WorkerFailed:
        """The error of a hang, judged once more by what the status pages say, as of the moment when it was seen."""
        now = self.clock()
        stacks = self._stacks()
        for host_processes in self.hosts:
            for number, place in host_processes.where().items():
                self.monitor.found(number, *place)
        again = self.monitor.verdict(now)
        verdict = again if isinstance(again, Hung) else verdict
        status, host_processes = self.monitor.processes[verdict.culprit], self._host_of[verdict.culprit]
        message = (
            f"{self._how_it_hangs(verdict, host_processes, status)}. The table below shows where every worker is "
            f"(timeout_s={self.spec.timeout_s:g})"
        )
        if not verdict.silent_s:
            message += ". If the work is only slow, give a longer timeout_s (--timeout)"
        rank, detail = status.number, f"{self.monitor.table(now)}\n\n{stacks}"
        error = self._failed(
            Failure(rank=rank, phase=status.phase, step=status.step, message=f"{message}.", detail=detail)
        )
        error.cause = "silence" if verdict.silent_s else "hang"
        return error

    def _how_it_hangs(self, verdict: Hung, host_processes: HostProcesses, status: ProcessStatus) -> str:
        name, place = self._who(status.number), f"in phase {status.phase} at step {status.step}"
        if not verdict.silent_s:
            return f"{name} made no progress for {verdict.seconds:.1f} s, {place}"
        if self.monitor.is_silent(silent_s := host_processes.silent_s()):
            return (
                f"nothing came from host {host_processes.host} for {silent_s:.1f} s, and {name} was last seen {place}. "
                "Check that this machine and the network to it work"
            )
        return (
            f"{name} sent no heartbeat for {verdict.silent_s:.1f} s, {place}. Its process was stopped, or native code "
            "in it does not release Python's global lock (GIL)"
        )

    def _stacks(self) -> str:
        """Of all processes; a silent host is not asked."""
        stacks: dict[int, str] = {}
        for host_processes in self.hosts:
            if not self.monitor.is_silent(host_processes.silent_s()):
                stacks |= host_processes.stacks()
        missing = "(no stack: the process does not answer, or has ended)"
        numbers = process_indices_of(self.spec.workers, self.spec.shard_processes)
        return "\n\n".join(f"{self.spec.name_of(number)}:\n{stacks.get(number) or missing}" for number in numbers)


def _without_type(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "type"}
